"""A language model corrected place by place, and normalised there.

    log P(v | h) = log P_LM(v | h) + f(v | h) − log Σ_u P_LM(u | h) · exp f(u | h)

h is all that was read before: the context and x_<t. Unlike an energy, f is paid for at every place with a sum over the
vocabulary, so P is exact and needs no Z; and unlike an energy, it never sees the whole of x. Several corrections are
applied in turn, each to the law that the last one left. With f = 0 it is P_LM.

Whole strings are read once, and then asked what comes next at any of their places. States [R, T, H] of all places are
kept, predictions [m, V] are made for few places at a time: with a vocabulary of 49,152 those of one batch would not fit
the memory.

Legend: R rows of T tokens, m places, V vocabulary, K layers chosen, H width of the states.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation, normalised
from freenergy.energies.saving import copied, linear_head, without_head
from freenergy.lm.activations import NetworkLM
from freenergy.lm.network_steps import log_softmax, states_at
from freenergy.lm.presets import set_dropout
from freenergy.lm.stepping import Stepper, begin, check_fits, in_chunks, started, sum_dtype, sum_tokens

_ROWS = 64  # whole strings whose states are held at once
_NUMBERS = 2**22  # of a prediction held at once: 16 MB in float32, and a few such arrays stand side by side


class Places(NamedTuple):
    """Where to predict from: after token ``place`` of row ``row``."""

    row: Int[Tensor, " m"]
    place: Int[Tensor, " m"]

    def split(self, size: int) -> "list[Places]":
        """At most ``size`` places at a time."""
        return [Places(*both) for both in zip(self.row.split(size), self.place.split(size), strict=True)]


class Reading(NamedTuple):
    """Strings that have been read."""

    scores: Callable[[Places], Float[Tensor, "m V"]]  # log P of every token, up to a constant of each place
    states: Callable[[Places], Float[Tensor, "m K H"]]  # the hidden states that say so, of the chosen layers


Correction = Callable[[Places, Float[Tensor, "m V"]], Float[Tensor, "m V"]]  # f at places where log P is given


def network_reader(model: PreTrainedModel, layers: tuple[int, ...] = ()) -> Callable[[Sequences], Reading]:
    """A network in two halves: states of whole strings, and the head that makes scores of some of them."""
    trunk, head = without_head(model), linear_head(model)
    if head is None:
        raise UserError(
            f"{type(model).__name__} does more to its last states than its head says, so that its predictions "
            'cannot be made place by place: take a baseline of kind "longer" or "balm"'
        )

    def read(rows: Sequences) -> Reading:
        out = trunk(rows.tokens, use_cache=False, output_hidden_states=bool(layers))
        chosen = states_at(out, layers, rows.tokens)

        def scores(at: Places) -> Tensor:
            logits: Tensor = head(out.last_hidden_state[at.row, at.place])
            return logits if logits.dtype == torch.float64 else logits.float()

        return Reading(scores, lambda at: chosen[at.row, at.place])

    return read


def targets(x: Continuations) -> tuple[Sequences, Places, Int[Tensor, " m"], Int[Tensor, " m"]]:
    """The whole strings of continuations; the places that predict them; their tokens; and the number of each token.

    Numbers count along the flattened [B, N, L]; contexts must not be empty.
    """
    R, L = x.shape[0] * x.shape[1], x.tokens.shape[2]
    starts = x.contexts.lengths.repeat_interleave(x.shape[1])
    row, i = x.mask.reshape(R, L).nonzero(as_tuple=True)
    return x.joined(), Places(row, starts[row] + i - 1), x.tokens.reshape(R, L)[row, i], row * L + i


@final
class ResidualLM:
    """P_LM and its corrections.

    A correction is a module: ``correction(rows, reading)`` reads whole strings, with what the base has read of them at
    hand, and returns f as a function of places and of log P there. It samples by reading every string again for each
    token, which is exact and slow.
    """

    draws_here = True

    def __init__(self, base: LanguageModel, corrections: Sequence[nn.Module], *, layers: tuple[int, ...] = ()) -> None:
        self.base, self.corrections = base, list(corrections)
        self.vocab_size, self.eos, self.max_length = base.vocab_size, base.eos, base.max_length
        assert isinstance(base, NetworkLM), "corrections read the base's network"
        self.device, self._reader = base.model.device, network_reader(base.model, layers)
        self.places_at_once = max(1, _NUMBERS // self.vocab_size)

    def read(self, rows: Sequences) -> Callable[[Places], Float[Tensor, "m V"]]:
        """Read whole strings once; what is returned gives log P(v | h) at any of their places."""
        reading = self._reader(rows)
        scorers: list[Correction] = [correction(rows, reading) for correction in self.corrections]

        def log_probs(at: Places) -> Tensor:
            log_p = log_softmax(reading.scores(at))
            for f in scorers:
                log_p = normalised(log_p + f(at, log_p))
            return log_p

        return log_probs

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P(x | c)."""
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        B, N, L = x.tokens.shape
        if not B or not N or not L:
            return torch.zeros(B, N, dtype=sum_dtype(self.device), device=self.device)
        check_fits(x.contexts, L, self.max_length)
        chunks = [x[b : b + max(1, _ROWS // N)] for b in range(0, B, max(1, _ROWS // N))]
        columns = [slice(n, n + _ROWS) for n in range(0, N, _ROWS)]
        return torch.cat([torch.cat([self._log_prob(some.candidates(n)) for n in columns], 1) for some in chunks])

    def _log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        rows, at, tokens, number = targets(x)
        values = torch.zeros(x.tokens.numel(), dtype=sum_dtype(self.device), device=self.device)
        if len(number):
            log_probs, size = self.read(rows), self.places_at_once
            parts = zip(at.split(size), tokens.split(size), strict=True)
            picked = [log_probs(some).gather(1, token.unsqueeze(1)).squeeze(1) for some, token in parts]
            values[number] = torch.cat(picked).to(values)
        return sum_tokens(values.view(x.tokens.shape), x.mask)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """log P(v | c) for every token v."""
        contexts = started(contexts, self.eos).trimmed().to(self.device)
        check_fits(contexts, 0, self.max_length)
        size = min(_ROWS, self.places_at_once)
        return torch.cat([self._next(contexts[b : b + size]) for b in range(0, len(contexts), size)])

    def _next(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        row = torch.arange(len(contexts), device=self.device)
        return self.read(contexts)(Places(row, contexts.lengths - 1))

    @torch.no_grad()
    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """``num`` independent continuations of each context."""
        contexts = contexts.to(self.device)
        check_fits(started(contexts, self.eos), space.length, self.max_length)

        def read(part: slice) -> Callable[[int], Stepper]:
            return lambda count: begin(self, contexts[part], count, space.length)

        return in_chunks(read, contexts, num, space, rng, truncation, rows=self.places_at_once)


@final
class Ralm(nn.Module):
    """The residual auto-regressive language model (Eq. 6 of Deng et al. 2020): f = the logits of a second network.

        log P(v | h) = log P_LM(v | h) + log P_φ(v | h) + const,      log P_φ = W · h_φ + const

    P_φ is a copy of the base with a head of its own that starts at W = 0, so that P starts as the base; the copy's
    states begin as the base's. The base stays as it is. A head that began as the base's would start at P_LM², and one
    that began at the difference to it would be the base trained longer under another name.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self._read = network_reader(network)

    @classmethod
    def from_base(cls, network: PreTrainedModel, *, dropout: float = 0.0) -> "Ralm":
        """A copy of the base's network that says nothing yet."""
        twin = copied(network)
        twin.config.get_text_config().tie_word_embeddings = False
        twin.config.tie_word_embeddings = False
        head = copy.deepcopy(twin.get_output_embeddings())
        with torch.no_grad():
            for weight in head.parameters():
                weight.zero_()
        twin.set_output_embeddings(head)
        set_dropout(twin, dropout)
        return cls(twin)

    def forward(self, rows: Sequences, reading: Reading) -> Correction:
        """Read the strings; what is returned gives f at places."""
        own = self._read(rows)
        return lambda at, log_p: own.scores(at)
