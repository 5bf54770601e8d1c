"""All that is measured of a base and its joint model, in one pass over stored draws.

    scores [W, n]  →  perplexity and gain, curve over draws, densities, statistics of text, examples
    rows           →  perplexity of base and baselines, paired comparisons

The result is JSON-like: plain numbers with their intervals beside them. Everything slow is kept in files below the
folder, so that an evaluation that was interrupted goes on where it was and ends with the same bits.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Integer
from torch import nn

from freenergy.corpus import Corpus, Windows
from freenergy.evaluation.baselines import Compared, compare
from freenergy.evaluation.certified import log_probs_of_data, measure_joint, together
from freenergy.evaluation.curves import draws_curve
from freenergy.evaluation.densities import densities
from freenergy.evaluation.examples import base_samples, choose_texts, picked, shown_windows
from freenergy.evaluation.perplexity import Counts, PerplexityReport
from freenergy.evaluation.positions import by_position
from freenergy.evaluation.scores import WindowScores, score_windows, window_log_probs
from freenergy.evaluation.text_statistics import Text, text_statistics, training_text
from freenergy.negatives.store import NegativeStore
from freenergy.partition import log_partition
from freenergy.progress import Progress
from freenergy.protocols import LanguageModel
from freenergy.randomness import Rng
from freenergy.storage import fingerprint
from freenergy.training.contrast import StoredContrast
from freenergy.training.feature_cache import FeatureCache

_WINDOWS = 4  # whose candidates are scored at once
_VERSIONS = 8  # times that a model's text is drawn for statistics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JointSubject:
    """An energy, and the base's draws for the windows that the joint model is measured on."""

    energy: nn.Module
    store: NegativeStore
    features: Path  # where features that energies share are kept
    batch: int  # continuations that the energy reads at once
    position_windows: int = 0
    position_draws: int = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Who is measured, and on which text. ``corpus`` has the tokenizer and the training text."""

    lm: LanguageModel
    corpus: Corpus
    windows: Windows
    split: str
    rows: Integer[np.ndarray, " W"]  # the windows that language models are measured on
    samples: int  # windows whose texts are shown
    baselines: dict[str, LanguageModel]
    joint: JointSubject | None = None


def measure(subject: Subject, folder: Path, rng: Rng, progress: Progress) -> dict[str, Any]:
    """The whole summary; see docs/evaluation.md for its fields."""
    windows, rows = subject.windows, subject.rows
    counts = Counts.of(windows.continuations(rows), windows.documents[rows], subject.corpus.tokenizer)
    log_base = window_log_probs(subject.lm, windows, rows, folder / "windows" / "base", "the base", progress)
    report = PerplexityReport.of(log_base, counts, subject.split)
    head = {"split": subject.split, "windows": len(counts), "documents": report.documents, "tokens": report.tokens}
    summary: dict[str, Any] = {**head, "base": report.to_json()}
    on_certified = None
    if subject.joint is not None:
        scores = _score(subject, subject.joint, folder, progress)
        summary |= _joint(subject, subject.joint, scores, folder, rng, progress)
        certified = log_probs_of_data(scores, log_partition(scores.log_weight[:, 1:]))["certified"].numpy()
        on_certified = Compared(certified, certified, scores.counts)
    else:
        summary["samples"] = base_samples(subject.lm, subject.corpus, windows, subject.samples, rng, progress)
    on_rows = Compared(log_base, log_base, counts)
    summary["baselines"] = {
        name: _baseline(name, lm, subject, on_rows, on_certified, folder, rng.child("baselines", name), progress)
        for name, lm in subject.baselines.items()
    }
    return summary


def _score(subject: Subject, joint: JointSubject, folder: Path, progress: Progress) -> WindowScores:
    """The one pass over all candidates."""
    contrast = StoredContrast(subject.windows, joint.store)
    cache = FeatureCache(joint.features, contrast, is_own=subject.split == "train", at_once=_WINDOWS)
    numbers = score_windows(subject.lm, joint.energy, cache, folder / "scores", progress, rows=joint.batch)
    rows = joint.store.rows.numpy()
    counts = Counts.of(subject.windows.continuations(rows), subject.windows.documents[rows], subject.corpus.tokenizer)
    return WindowScores(**numbers, counts=counts)


def _joint(
    subject: Subject, joint: JointSubject, scores: WindowScores, folder: Path, rng: Rng, progress: Progress
) -> dict[str, Any]:
    contrast = StoredContrast(subject.windows, joint.store)
    report = measure_joint(scores)
    if subject.split in ("train", "validation"):
        used = "was trained on" if subject.split == "train" else "was chosen by"
        words = f"measured on {subject.split} text, which the energy {used}"
        report = replace(report, verdict=together(words, report.verdict))
    columns = choose_texts(scores, _VERSIONS, rng.child("texts"))
    samples, examples = shown_windows(contrast, scores, columns, subject.corpus, subject.samples)
    human = torch.zeros(len(scores.counts), 1, dtype=torch.long)
    texts = {
        name: Text(picked(contrast, chosen), scores.counts.documents)
        for name, chosen in {"human": human, **columns}.items()
    }
    return {
        "joint": report.to_json(),
        "draws_curve": draws_curve(scores),
        "densities": densities(scores, {name: chosen[:, 0] for name, chosen in columns.items()}),
        "text": text_statistics(texts, training_text(subject.corpus), progress),
        "by_position": _positions(subject, joint, folder, rng, progress),
        "samples": samples,
        "examples": examples,
    }


def _positions(
    subject: Subject, joint: JointSubject, folder: Path, rng: Rng, progress: Progress
) -> list[dict[str, Any]]:
    if not joint.position_windows:
        return []
    first = joint.store.rows[: joint.position_windows].numpy()
    return by_position(
        subject.lm,
        joint.energy,
        subject.windows.continuations(first),
        subject.windows.documents[first],
        subject.corpus.space,
        joint.position_draws,
        folder / "positions",
        rng.child("positions"),
        progress,
    )


def _baseline(
    name: str,
    lm: LanguageModel,
    subject: Subject,
    on_rows: Compared,
    on_certified: Compared | None,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> dict[str, Any]:
    """One baseline against the base on its windows, and against the joint's certificate on the joint's windows."""
    mark = fingerprint(name)  # a baseline may be called base
    log_p = window_log_probs(lm, subject.windows, subject.rows, folder / "windows" / mark, name, progress)
    against_joint = None
    if on_certified is not None and subject.joint is not None:
        rows = subject.joint.store.rows.numpy()
        beside = window_log_probs(lm, subject.windows, rows, folder / "certified" / mark, name, progress)
        against_joint = on_certified._replace(baseline=beside)
    return compare(on_rows._replace(baseline=log_p), against_joint, rng)
