"""Scores of candidates, folded chunk by chunk into what an evaluation reports.

    chunk of windows × n candidates  →  numbers of each window:  bounds and diagnostics, curve, densities, chosen texts

Memory holds one chunk, and of every window some hundred numbers; neither grows with n times the windows. Everything is
a sum over a window's own candidates, so the chunks change no bit.
"""

from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.scored import Scored
from freenergy.corpus import Corpus
from freenergy.evaluation.certified import WindowNumbers
from freenergy.evaluation.examples import Chooser, shown_window
from freenergy.evaluation.figure_numbers import curve_numbers, density_numbers
from freenergy.evaluation.ranking import ranking_numbers


@final
class Folding:
    """Takes the windows in their order; those at the places ``shown`` are shown."""

    def __init__(self, corpus: Corpus, shown: Collection[int], versions: int, rng: Rng) -> None:
        self._corpus, self._shown = corpus, frozenset(shown)
        self._choose, self._seen = Chooser(versions, rng), 0
        self._numbers: list[WindowNumbers] = []
        self._tensors: dict[str, list[Tensor]] = {"base": [], "joint": [], "curve": [], "densities": [], "ranking": []}
        self.samples: list[dict[str, Any]] = []
        self.examples: list[dict[str, Any]] = []

    def add(self, scores: Scored) -> None:
        """The next windows."""
        found, columns = WindowNumbers.of(scores), self._choose(scores)
        first = {name: chosen[:, 0] for name, chosen in columns.items()}
        new = {"curve": curve_numbers(scores), "densities": density_numbers(scores, found.Z, first)}
        new |= {"ranking": ranking_numbers(scores), **columns}
        self._numbers.append(found)
        for name, values in new.items():
            self._tensors[name].append(values)
        for w in (w for w in range(len(scores)) if self._seen + w in self._shown):
            sample, example = shown_window(scores, w, columns, self._corpus)
            self.samples.append(sample)
            self.examples.append(example)
        self._seen += len(scores)

    @property
    def numbers(self) -> WindowNumbers:
        """Bounds and diagnostics of all windows."""
        return WindowNumbers.cat(self._numbers)

    def __getitem__(self, name: str) -> Tensor:
        """Return ``curve``, ``densities``, ``ranking``, or which candidates are ``base`` and ``joint`` text."""
        return torch.cat(self._tensors[name])
