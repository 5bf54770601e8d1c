"""What B × N candidates remember of their contexts and of themselves.

    prefix: keys and values [B, K, P, D], one copy a context;    suffix: [L, B, K, N, D], allocated once

The candidates of a context lie side by side under each group of heads, so that the products with the prefix are B·K
large ones. The suffix is filled token by token and lies in memory as it is filled: a step writes one stretch and reads
what there is from end to end. Compiled steps have it as [B, C, K, L, D, 64], in blocks of 64 candidates.

Legend: B contexts, N candidates, C blocks of them, K groups of G heads, H = K·G, D features of a head, P prefix tokens,
L suffix tokens.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.base.decoding.families import Network
from freenergy.base.shared_prefix import Prefix


@final
@dataclass(slots=True, kw_only=True)
class Memory:
    """Keys and values of every layer; ``filled`` tokens of the suffix so far."""

    prefix_keys: list[Float[Tensor, "BK P D"]]
    prefix_values: list[Float[Tensor, "BK P D"]]
    keys: list[Float[Tensor, "B K N L D"]] | list[Float[Tensor, "B C K L D lanes"]]
    values: list[Float[Tensor, "B K N L D"]] | list[Float[Tensor, "B C K L D lanes"]]
    lengths: Int[Tensor, " B"]
    unseen: Float[Tensor, "B P"] | None  # −inf behind the end of a shorter context; None where all are as long
    angles: tuple[Float[Tensor, "L B half"], Float[Tensor, "L B half"]] | None  # cos and sin at the suffix's places
    filled: int = 0

    @classmethod
    def after(cls, prefix: Prefix, network: Network, num: int, length: int, *, lanes: int | None = None) -> "Memory":
        """Nothing yet but the contexts; ``lanes`` candidates in a block, or none of them where it is None."""
        B, K, P, D = prefix.keys[0].shape
        like, shape = network.embedding, (B, K, num, length, D)
        # torch's products of a few queries with keys by token are slow; filling keys by feature costs less than that
        rooms = (_by_feature if network.heads > network.groups else _by_token, _by_token)
        if lanes is not None:
            rooms, shape = (_in_lanes, _in_lanes), (B, K, -(-num // lanes), length, D * lanes)
        ahead = torch.arange(P, device=like.device) >= prefix.lengths.unsqueeze(1)
        room = [[make(like, shape) for _ in network.layers] for make in rooms]
        if lanes is not None:
            room = [[kept.unflatten(-1, (D, lanes)) for kept in some] for some in room]
        return cls(
            prefix_keys=[keys.reshape(B * K, P, D) for keys in prefix.keys],
            prefix_values=[values.reshape(B * K, P, D) for values in prefix.values],
            keys=room[0],
            values=room[1],
            lengths=prefix.lengths,
            unseen=like.new_zeros(B, P).masked_fill_(ahead, -math.inf) if bool(ahead.any()) else None,
            angles=_angles(network, prefix.lengths, length),
        )

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Candidate n of context b becomes what candidate rows[b, n] was."""
        here = torch.arange(rows.shape[1], device=rows.device)
        for kept in (*self.keys, *self.values):
            for b, order in enumerate(rows):
                if kept.dim() == 5:
                    kept[b, :, :, : self.filled] = kept[b][:, order, : self.filled]
                else:
                    lanes = kept.shape[-1]
                    past = kept[b, :, :, : self.filled].movedim(-1, 1)
                    past[here // lanes, here % lanes] = past[order // lanes, order % lanes]


_Shape = tuple[int, int, int, int, int]  # B, K, N, L, D


def _by_token(like: Tensor, shape: _Shape) -> Tensor:
    """Plain torch multiplies what is not yet filled, and masks it: it must be finite."""
    B, K, N, L, D = shape
    return like.new_zeros(L, B, K, N, D).permute(1, 2, 3, 0, 4)


def _by_feature(like: Tensor, shape: _Shape) -> Tensor:
    B, K, N, L, D = shape
    return like.new_zeros(B, K, N, D, L).transpose(-1, -2)


def _in_lanes(like: Tensor, shape: _Shape) -> Tensor:
    B, K, C, L, D = shape
    return like.new_empty(B, C, K, L, D)


def _angles(network: Network, lengths: Int[Tensor, " B"], length: int) -> tuple[Tensor, Tensor] | None:
    if network.rotation is None:
        return None
    places = torch.arange(length, device=lengths.device).unsqueeze(1) + lengths
    cos, sin = network.rotation(places)
    half = cos.shape[-1] // 2
    return cos[..., :half].contiguous(), sin[..., :half].contiguous()
