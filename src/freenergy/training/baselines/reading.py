"""Whole strings read once, and then asked what comes next at any of their places.

    scores(r, t)[v] = log P_LM(v | the tokens 0 … t of row r) + const

States [R, T, H] of all places are kept, predictions [m, V] are made for few places at a time: with a vocabulary of
49,152 those of one batch would not fit the memory.

Legend: R rows of T tokens, m places, V vocabulary, K layers chosen, H width of the states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations, Sequences
from freenergy.energies.saving import without_head
from freenergy.lm.network_steps import states_at

NUMBERS = 2**22  # of a prediction held at once: 16 MB in float32, and a few such arrays stand side by side


@final
@dataclass(frozen=True, slots=True)
class Places:
    """Where to predict from: after token ``place`` of row ``row``."""

    row: Int[Tensor, " m"]
    place: Int[Tensor, " m"]

    @classmethod
    def all(cls, R: int, T: int, device: torch.device) -> "Places":
        """Every place of R rows of T tokens, row by row."""
        place = torch.arange(T, device=device)
        return cls(torch.arange(R, device=device).repeat_interleave(T), place.repeat(R))

    def __len__(self) -> int:
        return len(self.row)

    def split(self, size: int) -> "list[Places]":
        """At most ``size`` places at a time."""
        return [Places(*both) for both in zip(self.row.split(size), self.place.split(size), strict=True)]


@runtime_checkable
class Reading(Protocol):
    """Strings that have been read."""

    def scores(self, at: Places) -> Float[Tensor, "m V"]:
        """log P of every token at some places, up to a constant of each place."""
        ...

    def states(self, at: Places) -> Float[Tensor, "m K H"]:
        """The hidden states that say so, of the chosen layers."""
        ...


@final
class NetworkReader:
    """A network in two halves: states of whole strings, and the head that makes scores of some of them."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...] = ()) -> None:
        self.model, self.layers = model, layers
        self.trunk = without_head(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module) or not self._is_whole(head):
            raise UserError(
                f"{type(model).__name__} does more to its last states than its head says, so that its predictions "
                'cannot be made place by place: take a baseline of kind "longer" or "balm"'
            )
        self.head = head

    def read(self, rows: Sequences) -> "NetworkReading":
        """One pass through the trunk."""
        out = self.trunk(rows.tokens, use_cache=False, output_hidden_states=bool(self.layers))
        return NetworkReading(self.head, out.last_hidden_state, states_at(out, self.layers, rows.tokens))

    @torch.no_grad()
    def _is_whole(self, head: nn.Module) -> bool:
        """Finds out on a short text whether the architecture changes its logits after the head."""
        V = self.model.config.get_text_config().vocab_size
        tokens = torch.tensor([[(997 * i + 17) % V for i in range(4)]], device=self.model.device)
        found = head(self.trunk(tokens, use_cache=False).last_hidden_state)
        wanted = self.model(tokens, use_cache=False).logits
        return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=1e-3)


@final
@dataclass(frozen=True, slots=True)
class NetworkReading:
    """States of all places, and the head."""

    head: nn.Module
    last: Float[Tensor, "R T H"]
    chosen: Float[Tensor, "R T K H2"]

    def scores(self, at: Places) -> Float[Tensor, "m V"]:
        """Logits, at least in float32."""
        logits: Tensor = self.head(self.last[at.row, at.place])
        return logits if logits.dtype == torch.float64 else logits.float()

    def states(self, at: Places) -> Float[Tensor, "m K H"]:
        """Of the chosen layers."""
        return self.chosen[at.row, at.place]


@final
class PlainReader:
    """Any language model, asked for one prediction after another."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def read(self, rows: Sequences) -> "PlainReading":
        """Nothing yet: each place is read when it is asked for."""
        return PlainReading(self.lm, rows)


@final
@dataclass(frozen=True, slots=True)
class PlainReading:
    """The strings themselves."""

    lm: LanguageModel
    rows: Sequences

    def scores(self, at: Places) -> Float[Tensor, "m V"]:
        """log P of every token."""
        return self.lm.next_log_probs(before(self.rows, at))

    def states(self, at: Places) -> Float[Tensor, "m K H"]:
        """None."""
        return torch.zeros(len(at), 0, 0, device=self.rows.tokens.device)


def before(rows: Sequences, at: Places) -> Sequences:
    """What has been read at each place: the tokens up to and with it."""
    return Sequences(rows.tokens[at.row], at.place + 1)


def targets(x: Continuations) -> tuple[Sequences, Places, Int[Tensor, " m"], Int[Tensor, " m"]]:
    """The whole strings of continuations; the places that predict them; their tokens; and the number of each token.

    Numbers count along the flattened [B, N, L]; contexts must not be empty.
    """
    R, L = x.shape[0] * x.shape[1], x.tokens.shape[2]
    starts = x.contexts.lengths.repeat_interleave(x.shape[1])
    row, i = x.mask.reshape(R, L).nonzero(as_tuple=True)
    return x.joined(), Places(row, starts[row] + i - 1), x.tokens.reshape(R, L)[row, i], row * L + i


def picked_in_parts(
    log_probs: Callable[[Places], Float[Tensor, "m V"]], at: Places, tokens: Int[Tensor, " m"], size: int
) -> Float[Tensor, " m"]:
    """log P of one token at each place, a few places at a time."""
    parts = zip(at.split(size), tokens.split(size), strict=True)
    return torch.cat([log_probs(some).gather(1, token.unsqueeze(1)).squeeze(1) for some, token in parts])
