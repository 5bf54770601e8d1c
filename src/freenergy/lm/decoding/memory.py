"""What B × N candidates remember of their contexts and of themselves.

    prefix: keys and values [B, K, P, D], one copy per context;    suffix: [S, B, K, N, W, D], allocated once

The suffix is filled stretch by stretch of W tokens: what a product reads of it lies in one piece, which is three times
as fast as reading the first tokens of longer rows. Compiled steps have it as [B, C, K, L, D, 64], in blocks of 64
candidates.

Legend: B contexts, N candidates, C blocks of them, K groups of G heads, H = K·G, D features of a head, P prefix tokens,
L suffix tokens in S stretches of W.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.lm.decoding.families import DecoderWeights
from freenergy.lm.shared_prefix import Prefix

_STRETCH = 16  # tokens at most: what is not yet filled is multiplied too


@final
@dataclass(slots=True, kw_only=True)
class Memory:
    """Keys and values of every layer; ``filled`` tokens of the suffix so far."""

    prefix_keys: list[Float[Tensor, "BK P D"]]
    prefix_values: list[Float[Tensor, "BK P D"]]
    keys: list[Float[Tensor, "S B K N W D"]] | list[Float[Tensor, "B C K L D lanes"]]
    values: list[Float[Tensor, "S B K N W D"]] | list[Float[Tensor, "B C K L D lanes"]]
    lanes: int | None
    lengths: Int[Tensor, " B"]
    unseen: Float[Tensor, "B P"] | None  # −inf behind the end of a shorter context; None where all are as long
    angles: tuple[Float[Tensor, "L B half"], Float[Tensor, "L B half"]] | None  # cos and sin at the suffix's places
    filled: int = 0

    @classmethod
    def after(
        cls, prefix: Prefix, network: DecoderWeights, num: int, length: int, *, lanes: int | None = None
    ) -> "Memory":
        """Start with the contexts alone; ``lanes`` candidates in a block, or none of them where it is None."""
        B, K, P, D = prefix.keys[0].shape
        S, W = stretches(length)
        shape = (S, B, K, num, W, D) if lanes is None else (B, -(-num // lanes), K, length, D, lanes)
        like = network.embedding
        # plain torch multiplies what is not yet filled, and masks it: it must be finite
        room = [[(like.new_zeros if lanes is None else like.new_empty)(shape) for _ in network.layers] for _ in "kv"]
        ahead = torch.arange(P, device=like.device) >= prefix.lengths.unsqueeze(1)
        return cls(
            prefix_keys=[keys.reshape(B * K, P, D) for keys in prefix.keys],
            prefix_values=[values.reshape(B * K, P, D) for values in prefix.values],
            keys=room[0],
            values=room[1],
            lanes=lanes,
            lengths=prefix.lengths,
            unseen=like.new_zeros(B, P).masked_fill_(ahead, -math.inf) if bool(ahead.any()) else None,
            angles=_angles(network, prefix.lengths, length),
        )

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n]."""
        here = torch.arange(rows.shape[1], device=rows.device)
        for kept in (*self.keys, *self.values):
            for b, order in enumerate(rows):
                if self.lanes is None:
                    past = kept[: -(-self.filled // kept.shape[-2]), b]
                    past.copy_(past[:, :, order])
                else:
                    past = kept[b, :, :, : self.filled].movedim(-1, 1)
                    past[here // self.lanes, here % self.lanes] = past[order // self.lanes, order % self.lanes]


def stretches(length: int) -> tuple[int, int]:
    """Return how many, and how long each of them: as long as each other, with room for ``length`` tokens."""
    S = max(1, -(-length // _STRETCH))
    return S, -(-length // S)


def _angles(network: DecoderWeights, lengths: Int[Tensor, " B"], length: int) -> tuple[Tensor, Tensor] | None:
    if network.rotation is None:
        return None
    places = torch.arange(length, device=lengths.device).unsqueeze(1) + lengths
    cos, sin = network.rotation(places)
    half = cos.shape[-1] // 2
    return cos[..., :half].contiguous(), sin[..., :half].contiguous()
