"""All slow shards of an evaluation, so that workers can make them in any order before ``measure`` reads them.

    ("windows", who, is_certified, file, rows)    ("scores", chunk)    ("position", window)

Each is made by the very function that ``measure`` would call for it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from freenergy.core.rng import Rng
from freenergy.evaluation.layout import log_probs_folder, positions_folder, scores_folder
from freenergy.evaluation.positions import position_path, write_position
from freenergy.evaluation.scores import log_prob_shards, scores_path, write_log_probs, write_scores
from freenergy.evaluation.summary import ResidualSubject, Subject, score_cache

Item = tuple[Any, ...]


@final
class EvaluationShards:
    """The shards of one evaluation of ``subject`` in ``folder``; ``rng`` is the one that ``measure`` gets."""

    def __init__(self, subject: Subject, folder: Path, rng: Rng) -> None:
        self.subject, self.folder, self.rng = subject, folder, rng
        self.cache = None if subject.joint is None else score_cache(subject, subject.joint)

    def missing(self) -> list[Item]:
        """The shards that are not there; those of the candidates, which take longest, come first."""
        subject, rows = self.subject, self.subject.rows
        items = [*self._scores(), *self._positions(), *self._log_probs(None, rows)]
        for name in subject.baselines:
            items += self._log_probs(name, rows)
            if subject.joint is not None:
                items += self._log_probs(name, subject.joint.store.rows.numpy(), is_certified=True)
        return items

    def make(self, item: Item) -> None:
        """Make one of them, unless it is there."""
        subject = self.subject
        match item:
            case ("windows", who, is_certified, file, rows):
                lm = subject.lm if who is None else subject.baselines[who]
                path = log_probs_folder(self.folder, who, is_certified=is_certified) / file
                write_log_probs(lm, subject.windows, np.array(rows, dtype=np.int64), path)
            case ("scores", k):
                self._score(self._joint, k)
            case ("position", b):
                self._step(self._joint, b)

    @property
    def _joint(self) -> ResidualSubject:
        assert self.subject.joint is not None, "without a residual model there are no such items"
        return self.subject.joint

    def _score(self, joint: ResidualSubject, k: int) -> None:
        assert self.cache is not None
        chunk = self.cache.chunk(k)
        write_scores(self.subject.residual, self.cache, scores_folder(self.folder), chunk, joint.batch)

    def _step(self, joint: ResidualSubject, b: int) -> None:
        x = self.subject.windows.continuations(joint.store.rows[b : b + 1].numpy())
        space, path = self.subject.corpus.space, position_path(positions_folder(self.folder), b)
        rng = self.rng.child("positions").child(b)
        write_position(self.subject.residual, x, space, joint.position_draws, path, rng)

    def _scores(self) -> Iterator[Item]:
        for k, chunk in enumerate(self.cache.chunks() if self.cache is not None else []):
            if not scores_path(scores_folder(self.folder), chunk).is_file():
                yield "scores", k

    def _positions(self) -> Iterator[Item]:
        joint = self.subject.joint
        for b in range(0 if joint is None else min(joint.position_windows, len(joint.store))):
            if not position_path(positions_folder(self.folder), b).is_file():
                yield "position", b

    def _log_probs(self, who: str | None, rows: np.ndarray, *, is_certified: bool = False) -> Iterator[Item]:
        folder = log_probs_folder(self.folder, who, is_certified=is_certified)
        for path, some in log_prob_shards(rows, folder):
            if not path.is_file():
                yield "windows", who, is_certified, path.name, tuple(some.tolist())
