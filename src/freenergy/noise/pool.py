"""A pool: many independent sentences of a language model, drawn once and shared by all texts that are measured.

    x_1 … x_n ~ q        n counts also the draws that were cut before EOS, which no sentence field contains

A field has one context, so one pool serves every sentence of a test set. ``fingerprint`` names the draws, so that a
pool that has trained a field is recognised when the field is measured.
"""

import hashlib
from dataclasses import dataclass
from typing import final

import numpy as np

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.core.sequences import Sequences, SequenceSpace

_BLOCK = 20_000  # sentences drawn at once


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Sentences of 1 … m words that a language model has drawn, and how many draws it took."""

    text: Sentences
    draws: int

    def __post_init__(self) -> None:
        if self.draws < self.text.num:
            raise UserError(f"{self.text.num} sentences cannot come from {self.draws} draws: count all of them")

    @property
    def fingerprint(self) -> str:
        """Return the name of these draws, by their content."""
        digest = hashlib.sha256(np.ascontiguousarray(self.text.tokens.astype(np.int64)).tobytes())
        digest.update(np.ascontiguousarray(self.text.bounds.astype(np.int64)).tobytes())
        return digest.hexdigest()[:16]


def draw_pool(
    lm: LanguageModel, longest: int, num: int, rng: Rng, progress: Progress = SILENT, label: str = "draws"
) -> Pool:
    """Draw ``num`` sentences; those that have no word, or no EOS after ``longest`` words, are counted and left out."""
    space = SequenceSpace(vocab_size=lm.vocab_size, length=longest + 1, eos=lm.eos)
    empty, parts = Sequences.from_lists([[]]), []
    with progress.track(label, num, "sentences") as advance:
        for first in range(0, num, _BLOCK):
            count = min(_BLOCK, num - first)
            x = lm.sample(empty, count, space, rng.shift(candidates=first)).x
            tokens, lengths = x.tokens[0].cpu().numpy(), x.lengths[0].cpu().numpy()
            whole = (tokens[np.arange(count), lengths - 1] == lm.eos) & (lengths > 1)
            parts.append(Sentences.padded(tokens[whole].astype(np.int32), lengths[whole]))
            advance(count)
    return Pool(joined(parts), num)


def joined(parts: list[Sentences]) -> Sentences:
    """Put sentences side by side."""
    sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(part.bounds) for part in parts)])
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(part.tokens for part in parts)])
    return Sentences(tokens, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
