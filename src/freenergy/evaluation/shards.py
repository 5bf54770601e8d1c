"""All slow shards of an evaluation, so that workers can make them in any order before ``measure`` reads them.

    ("windows", who, is_certified, file, rows)   ("rung", name, file, rows)   ("scores", chunk)   ("position", window)
    ("written", window)   ("sequential", window)

Each is made by the very function that ``measure`` would call for it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from freenergy.core.rng import Rng
from freenergy.evaluation.positions import position_path, write_position
from freenergy.evaluation.scores import log_prob_shards, log_probs_folder, scores_path, write_log_probs, write_scores
from freenergy.evaluation.sequential import ConditionalRuns
from freenergy.evaluation.summary import Subject, conditional_runs, score_cache, writers, written_rows
from freenergy.evaluation.written import write_texts, written_path
from freenergy.lm.sample_only import has_log_prob

Item = tuple[Any, ...]


@final
class EvaluationShards:
    """The shards of one evaluation of ``subject`` in ``folder``; ``rng`` is the one that ``measure`` gets."""

    def __init__(self, subject: Subject, folder: Path, rng: Rng) -> None:
        self.subject, self.folder, self.rng = subject, folder, rng
        self.cache = None if subject.joint is None else score_cache(subject, subject.joint)
        self.runs: ConditionalRuns | None = None
        if subject.joint is not None and subject.joint.sequential is not None:
            self.runs = conditional_runs(subject, subject.joint, subject.joint.sequential, folder, rng)

    def missing(self) -> list[Item]:
        """The shards that are not there; those of the candidates, which take longest, come first."""
        subject, rows = self.subject, self.subject.rows
        items = [*self._scores(), *self._sequential(), *self._written(), *self._positions()]
        if has_log_prob(subject.lm):
            items += self._log_probs(None, rows)
        for name in subject.baselines:
            items += self._log_probs(name, rows)
            if subject.joint is not None:
                items += self._log_probs(name, subject.joint.whole, is_certified=True)
        for name in subject.below:
            items += self._rung(name)
        return items

    def make(self, item: Item) -> None:
        """Make one of them, unless it is there."""
        subject = self.subject
        match item:
            case ("windows", who, is_certified, file, rows):
                lm = subject.lm if who is None else subject.baselines[who]
                path = log_probs_folder(self.folder, who, is_certified=is_certified) / file
                write_log_probs(lm, subject.windows, np.array(rows, dtype=np.int64), path)
            case ("rung", name, file, rows):
                path = self.folder / "rungs" / name / file
                write_log_probs(subject.below[name], subject.windows, np.array(rows, dtype=np.int64), path)
            case ("scores", k):
                assert self.cache is not None
                assert subject.joint is not None
                chunk, folder = self.cache.chunk(k), self.folder / "scores"
                write_scores(subject.residual, self.cache, folder, chunk, subject.joint.batch)
            case ("written", row):
                assert subject.joint is not None
                who = writers(subject, subject.joint)
                write_texts(who, subject.corpus, subject.windows, row, self.folder, self.rng)
            case ("sequential", b):
                assert self.runs is not None
                self.runs.make(b)
            case ("position", b):
                assert subject.joint is not None
                x = subject.windows.continuations(subject.joint.store.rows[b : b + 1].numpy())
                draws, path = subject.joint.position_draws, position_path(self.folder, b)
                rng = self.rng.child("positions").child(b)
                write_position(subject.residual, x, subject.corpus.space, draws, path, rng)

    def _scores(self) -> Iterator[Item]:
        for k, chunk in enumerate(self.cache.chunks() if self.cache is not None else []):
            if not scores_path(self.folder / "scores", chunk).is_file():
                yield "scores", k

    def _positions(self) -> Iterator[Item]:
        joint = self.subject.joint
        for b in range(0 if joint is None else min(joint.position_windows, len(joint.store))):
            if not position_path(self.folder, b).is_file():
                yield "position", b

    def _sequential(self) -> Iterator[Item]:
        for b in range(0 if self.runs is None else len(self.runs.rows)):
            if self.runs is not None and not self.runs.path(b).is_file():
                yield "sequential", b

    def _written(self) -> Iterator[Item]:
        joint = self.subject.joint
        for row in [] if joint is None else written_rows(self.subject, joint).tolist():
            if not written_path(self.folder, row).is_file():
                yield "written", row

    def _rung(self, name: str) -> Iterator[Item]:
        for path, some in log_prob_shards(self.subject.compared_rows, self.folder / "rungs" / name):
            if not path.is_file():
                yield "rung", name, path.name, tuple(some.tolist())

    def _log_probs(self, who: str | None, rows: np.ndarray, *, is_certified: bool = False) -> Iterator[Item]:
        folder = log_probs_folder(self.folder, who, is_certified=is_certified)
        for path, some in log_prob_shards(rows, folder):
            if not path.is_file():
                yield "windows", who, is_certified, path.name, tuple(some.tolist())
