"""A language model adapted to a text by a few weights, exactly normalised.

    log P(v | h) = (1 + w · …) · log P_LM(v | h) + w_1 · log p_1(v) + Σ_j w_j · f_j(v | h) − log Z(h)

h is all that was read: the context and x_<t. p_1 is the law of single tokens in the counted text and f_j are the
sparse terms of ``local_terms``: longer n-grams of that text, tokens of h and how rare they are, and what followed the
last tokens of h before. With "entropy" the temperature of P_LM depends on how sure it is, H(P_LM(· | h)) / log V. All
weights 0 is P_LM. log Z(h) is a sum over the vocabulary, so P is a language model like any other: it can be drawn from
by the base's fast steps, read token by token, traced, and corrected by an energy.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.activations import NetworkLM, Trace, TracingLM
from freenergy.lm.editing import EditableLM, EditedLM
from freenergy.lm.local_counts import LocalCounts
from freenergy.lm.local_terms import LocalState, LocalTerms, add_cells, local_names, order_name
from freenergy.lm.stepping import Stepper, begin

LOG_P, ENTROPY, UNIGRAM = "log p", "entropy · log p", order_name(1)
_WEIGHTS, _UNDER, _COUNTS = "weights.json", "under", "local"


def weight_names(*, order: int, cache: bool, copy: bool, entropy: bool) -> list[str]:
    """Return the names of the weights: those of the dense terms, then those of the sparse ones.

    >>> len(weight_names(order=5, cache=True, copy=True, entropy=False))
    13
    """
    dense = [LOG_P] + [ENTROPY] * entropy + [UNIGRAM] * (order > 0)
    return dense + local_names(order=order, cache=cache, copy=copy)


@final
class LocalEdit:
    """The mix of B × N candidates on their way."""

    def __init__(self, lm: "AdaptedLM", contexts: Sequences, length: int) -> None:
        self._lm, self._state = lm, LocalState(lm.counts, contexts, length)
        self.advance, self.select = self._state.advance, self._state.select

    def apply(self, scores: Float[Tensor, "some W"], rows: slice) -> None:
        """Change log P_LM into log P, both up to a constant of each row."""
        lm, own = self._lm, scores[:, : self._lm.vocab_size]
        weight = lm.weights.get(ENTROPY, 0.0)
        if weight:
            own.mul_(1 + lm.weights.get(LOG_P, 0.0) + weight * relative_entropy(own).unsqueeze(1))
            own.add_(lm.unigram.to(own))
        else:
            torch.add(lm.unigram.to(own), own, alpha=1 + lm.weights.get(LOG_P, 0.0), out=own)
        add_cells(scores, lm.terms.cells(self._state, rows))


def relative_entropy(scores: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """Compute H / log V of the laws with these scores: 0 is sure, 1 uniform."""
    log_p = scores - scores.logsumexp(-1, keepdim=True)
    return -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1) / math.log(scores.shape[-1])


@final
class AdaptedLM:
    """P_LM and a local mix on top of it.

    It shows hidden states and the network where the base has them; statistics of a trace are of the adapted law.

    >>> import numpy as np
    >>> counts = LocalCounts.of(np.array([1, 2, 0, 1, 1, 2, 0]), vocab_size=3, eos=0, order=2)
    >>> lm = AdaptedLM(counts.ngrams, {"log(1 + count)": 0.5}, counts)
    >>> round(lm.next_log_probs(Sequences.from_lists([[1, 2]])).exp().sum().item(), 12)
    1.0
    """

    kind: ClassVar[str] = "adapted"
    record_keys: ClassVar[tuple[str, ...]] = ("under", "path")

    def __init__(self, base: LanguageModel, weights: Mapping[str, float], counts: LocalCounts) -> None:
        known = weight_names(order=counts.ngrams.order, cache=True, copy=True, entropy=True)
        if unknown := set(weights) - set(known):
            raise UserError(f"a local mix has no weight {min(unknown)!r}: its weights are {', '.join(known)}")
        if base.vocab_size != counts.vocab_size:
            raise UserError(
                f"the counts are of {counts.vocab_size} tokens and the base has {base.vocab_size}: count text that was "
                "encoded for this base"
            )
        self.base, self.weights, self.counts = base, dict(weights), counts
        self.vocab_size, self.eos, self.max_length = base.vocab_size, base.eos, base.max_length
        self.draws_here = base.draws_here
        self.terms = LocalTerms(counts, weights)
        self.unigram = torch.from_numpy(weights.get(UNIGRAM, 0.0) * counts.log_unigram)
        self._law: Any = base.edited(self._edit) if isinstance(base, EditableLM) else EditedLM(base, self._edit)
        if isinstance(base, TracingLM):  # only then is it one itself
            self.num_layers, self.width = base.num_layers, base.width
        if isinstance(base, NetworkLM):
            self.model = base.model

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P(x | c)."""
        log_p: Tensor = self._law.log_prob(x)
        return log_p

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P(v | c) for every token v."""
        log_p: Tensor = self._law.next_log_probs(contexts)
        return log_p

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context."""
        draws: Draws = self._law.sample(contexts, num, space, rng, truncation)
        return draws

    def stepper(self, contexts: Sequences, num: int, length: int) -> Stepper:
        """Return a stepper at the start of ``num`` continuations of each context."""
        return begin(self._law, contexts, num, length)

    def trace(self, x: Continuations, layers: Sequence[int], *, after: bool = False) -> Trace:
        """Record the states of the base and the predictions of the adapted law on given continuations."""
        assert isinstance(self._law, TracingLM), "ask isinstance(lm, TracingLM) first"
        return self._law.trace(x, layers, after=after)

    def sample_traced(
        self,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation = ANCESTRAL,
        layers: Sequence[int] = (),
        data: Continuations | None = None,
        *,
        after: bool = False,
    ) -> tuple[Draws, Trace]:
        """Draw as ``sample`` does, and return the trace that ``trace`` would read from them, after that of ``data``."""
        assert isinstance(self._law, TracingLM), "ask isinstance(lm, TracingLM) first"
        return self._law.sample_traced(contexts, num, space, rng, truncation, layers, data, after=after)

    def save_mix(self, folder: Path) -> None:
        """Write counts and weights, without the base."""
        self.counts.save(folder)
        write_json(folder / _WEIGHTS, self.weights)

    @classmethod
    def on(cls, base: LanguageModel, folder: Path) -> "AdaptedLM":
        """Return a base with the counts and weights that ``save_mix`` wrote."""
        weights = {name: float(weight) for name, weight in read_json(folder / _WEIGHTS).items()}
        return cls(base, weights, LocalCounts.load(folder))

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the mix into ``folder/local`` and its base into ``folder/under``."""
        from freenergy.lm.load import save_lm

        save_lm(self.base, folder / _UNDER)
        self.save_mix(folder / _COUNTS)
        return {"under": _UNDER, "path": _COUNTS}

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "AdaptedLM":
        """Load the mix that the record names, and the base under it."""
        from freenergy.lm.load import load_lm

        return cls.on(load_lm(folder / record["under"], tokenizer), folder / record["path"])

    def _edit(self, contexts: Sequences, length: int) -> LocalEdit:
        return LocalEdit(self, contexts, length)
