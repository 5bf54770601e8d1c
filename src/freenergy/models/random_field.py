"""Random-field language models: a potential of whole sentences, with or without a language model below it.

    globally normalised (GN-ELM, WSME)     p(x) = q(x) e^{U(x)} / Z
    trans-dimensional (TRF)                p(x) = π_l · q(x) e^{U(x)} / Z_l,        l = the words of x,  l ≤ m

q is the base; without one q = 1 (the absolute form). ``log_score`` = log q + U is always known. ``log_prob`` sums to
one, so it is there only where the normaliser is exact; with an estimated one ``log_prob_estimate`` says what it is.
Certificates need no normaliser at all (``partition.lengths``).
"""

from dataclasses import dataclass, replace
from typing import Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.models.length_law import LengthLaw
from freenergy.models.normalisers import Normaliser, check_lengths

_ROWS = 2000  # sentences whose probabilities are computed at once


@runtime_checkable
class Potential(Protocol):
    """U(x) of whole sentences."""

    def __call__(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return U of each sentence."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class RandomField:
    """p(x) ∝ q(x) e^{U(x)} over sentences of 1 … ``longest`` words.

    ``trained_on`` names the pools of draws that the potential was fitted to: log Z on those is too low.
    """

    potential: Potential
    base: LanguageModel | None
    eos: int
    vocab_size: int
    longest: int
    normaliser: Normaliser | None = None
    lengths: LengthLaw | None = None
    trained_on: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.base is not None and (self.base.vocab_size, self.base.eos) != (self.vocab_size, self.eos):
            raise UserError(
                "the base has another vocabulary or EOS than the field: take the base that it was fitted on"
            )
        if self.lengths is not None and self.lengths.longest != self.longest:
            raise UserError(
                f"the length law ends at {self.lengths.longest} words, the field at {self.longest}: fit one"
            )
        if self.normaliser is not None and self.normaliser.per_length and self.lengths is None:
            raise UserError("a normaliser for each length needs a length law: give lengths=LengthLaw.fit(…)")

    @property
    def space(self) -> SequenceSpace:
        """The strings that a base draws for this field; those that are cut before EOS have probability 0 in it."""
        return SequenceSpace(vocab_size=self.vocab_size, length=self.longest + 1, eos=self.eos)

    def with_normaliser(self, normaliser: Normaliser, lengths: LengthLaw | None = None) -> "RandomField":
        """Return the same field with another normaliser."""
        return replace(self, normaliser=normaliser, lengths=lengths)

    def log_base(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return log q of each sentence; 0 in the absolute form."""
        self._check(text)
        if self.base is None:
            return np.zeros(text.num)
        parts = [text.take(i, min(i + _ROWS, text.num)) for i in range(0, text.num, _ROWS)]
        found = [self.base.log_prob(part.continuations())[0].double().cpu().numpy() for part in parts]
        return np.concatenate([np.zeros(0), *found])

    def log_scores(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return log q + U of each sentence."""
        found: Float64[np.ndarray, " R"] = self.log_base(text) + self.potential(text)
        return found

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Return log q + U of whole sentences after the empty context; −inf for strings without their EOS."""
        if x.contexts.tokens.shape[1] and int(x.contexts.lengths.max()):
            raise UserError("a random field is a law of whole sentences: give continuations of the empty context")
        rows, found = x.flat(), torch.full((x.lengths.numel(),), -torch.inf, dtype=torch.float64)
        last = rows.tokens.gather(1, (rows.lengths - 1).clamp(min=0).unsqueeze(1))[:, 0]
        whole = (last == self.eos) & (rows.lengths > 1) & (rows.lengths <= self.longest + 1)
        some = rows[whole]
        text = Sentences.padded(some.tokens.cpu().numpy(), some.lengths.cpu().numpy())
        if text.num:
            found[whole] = torch.from_numpy(self.log_scores(text))
        return found.view(x.shape).to(x.tokens.device)

    def log_prob(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return log p, which sums to one over all sentences; needs an exact normaliser."""
        if self.normaliser is None or not self.normaliser.is_exact:
            raise UserError(
                "log p needs an exact normaliser, and this field has "
                f"{'none' if self.normaliser is None else 'an estimate'}: use log_prob_estimate, or a certificate"
            )
        return self.log_prob_estimate(text)

    def log_prob_estimate(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return log q + U − log Z (+ log π_l) with the normaliser that there is."""
        if self.normaliser is None:
            raise UserError("the field has no normaliser: estimate one with partition.lengths, or give an exact one")
        found: Float64[np.ndarray, " R"] = self.log_scores(text) - self.normaliser.log_z(text.lengths)
        if self.lengths is not None:
            found = found + self.lengths.log_prob(text.lengths)
        return found

    def _check(self, text: Sentences) -> None:
        check_lengths(text.lengths, self.longest)
        if len(text.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < self.vocab_size:
            raise UserError(
                f"a word is not in the vocabulary of {self.vocab_size}: encode the text with the field's tokenizer"
            )
