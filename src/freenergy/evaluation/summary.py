"""All that is measured of a base and its residual model, in one pass over stored draws.

    scores [W, n]  →  perplexity and gain, curve over draws, densities, statistics of text, examples
    rows           →  perplexity of base and baselines, paired comparisons

Scores are folded chunk by chunk, so that memory holds numbers of windows and not of all their candidates (``folding``).
The result is JSON-like: plain numbers with their intervals. Everything slow is kept in files below the
folder, so that an evaluation that was interrupted resumes where it was and ends with the same bits.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import nn

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus, Windows
from freenergy.evaluation.black_box import nats_curve, without_perplexity
from freenergy.evaluation.bootstrap import Compared, compare
from freenergy.evaluation.certified import ChunkRows, gain_note, residual_report, together
from freenergy.evaluation.examples import base_samples, picked
from freenergy.evaluation.figure_numbers import densities, draws_curve
from freenergy.evaluation.folding import Folding
from freenergy.evaluation.ladder import ENERGY, ladder
from freenergy.evaluation.perplexity import Counts, PerplexityReport
from freenergy.evaluation.positions import by_position
from freenergy.evaluation.ranking import ranking_of
from freenergy.evaluation.scores import WINDOWS, log_probs_folder, scored_chunks, window_log_probs
from freenergy.evaluation.sequential import ConditionalRuns, sequential_report
from freenergy.evaluation.text_statistics import (
    CountedText,
    nearer_to_human,
    shares_of_text,
    text_statistics,
    training_text,
)
from freenergy.evaluation.written import Writers, write_texts, written_report
from freenergy.lm.sample_only import has_log_prob
from freenergy.models.residual import Residual
from freenergy.noise.store import NegativeStore
from freenergy.samplers.sequential import Sequential
from freenergy.training.contrastive_batches import StoredContrast
from freenergy.training.feature_cache import FeatureCache

_VERSIONS = 8  # times that a model's text is drawn for statistics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSubject:
    """An energy, and the base's draws for the windows that the residual model is measured on."""

    energy: nn.Module
    windows: Windows  # that the draws are for; chunk windows where the model writes chunk by chunk
    store: NegativeStore
    features: Path  # where features that energies share are kept
    batch: int  # continuations that the energy reads at once
    position_windows: int = 0
    position_draws: int = 32
    texts: int = 0  # prefixes after which whole texts are written
    sequential: Sequential | None = None  # the particles that are certified too

    @property
    def whole(self) -> Integer[np.ndarray, " W"]:
        """The whole windows that the residual model is measured on."""
        return self.windows.whole_of(self.store.rows.numpy())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured, and on which text. ``corpus`` has the tokenizer and the training text."""

    lm: LanguageModel
    corpus: Corpus
    windows: Windows
    split: str
    rows: Integer[np.ndarray, " W"]  # the windows that language models are measured on
    samples: int  # windows whose texts are shown
    baselines: dict[str, LanguageModel]
    below: dict[str, LanguageModel] = field(default_factory=dict)  # the rungs of the ladder below ``lm``, lowest first
    rung: str = "base"  # the name of ``lm``'s own
    joint: ResidualSubject | None = None

    @property
    def residual(self) -> Residual:
        """The base with the energy, where there is one."""
        return Residual(self.lm) if self.joint is None else Residual(self.lm, self.joint.energy)

    @property
    def compared_rows(self) -> Integer[np.ndarray, " W"]:
        """The windows on which all rungs are compared: the residual model's, where there is one."""
        return self.rows if self.joint is None else self.joint.whole

    def counts(self, windows: Windows, rows: Integer[np.ndarray, " W"]) -> Counts:
        """Count the true text of some windows."""
        return Counts.of(windows.continuations(rows), windows.documents[rows], self.corpus.tokenizer)


def measure(subject: Subject, folder: Path, rng: Rng, progress: Progress) -> dict[str, Any]:
    """The whole summary; see docs/evaluation.md for its fields."""
    windows, rows = subject.windows, subject.rows
    counts = subject.counts(windows, rows)
    log_base = np.zeros(len(rows))  # relative to a base that only samples
    if has_log_prob(subject.lm):
        log_base = window_log_probs(subject.lm, windows, rows, log_probs_folder(folder, None), "the base", progress)
    report = PerplexityReport.of(log_base, counts, subject.split)
    head = {"split": subject.split, "windows": len(counts), "documents": report.documents, "tokens": report.tokens}
    summary: dict[str, Any] = {**head, "base": report.to_json()}
    on_certified: Compared | None = None
    own = {subject.rung: log_base}
    if subject.joint is not None:
        found, on_certified, own = _joint(subject, subject.joint, folder, rng, progress)
        summary |= found
    else:
        summary["samples"] = base_samples(subject.lm, subject.corpus, windows, subject.samples, rng, progress)
    on_rows = Compared(log_base, log_base, counts)
    on_ladder = counts if on_certified is None else on_certified.counts
    summary["ladder"] = ladder(_below(subject, folder, progress) | own, on_ladder, rng.child("ladder"))
    summary["baselines"] = {
        name: _baseline(name, lm, subject, on_rows, on_certified, folder, rng.child("baselines", name), progress)
        for name, lm in subject.baselines.items()
    }
    return summary if has_log_prob(subject.lm) else without_perplexity(summary)


def _below(subject: Subject, folder: Path, progress: Progress) -> dict[str, Float[np.ndarray, " W"]]:
    """log P of the compared windows by the rungs below."""
    return {
        name: window_log_probs(
            lm, subject.windows, subject.compared_rows, folder / "rungs" / name, f"rung {name}", progress
        )
        for name, lm in subject.below.items()
    }


def score_cache(subject: Subject, joint: ResidualSubject) -> FeatureCache:
    """The windows of the residual model with their candidates, in the chunks that are scored at once."""
    contrast = StoredContrast(joint.windows, joint.store)
    return FeatureCache(joint.features, contrast, leave_self_out=subject.split == "train", batch_size=WINDOWS)


def _joint(
    subject: Subject, joint: ResidualSubject, folder: Path, rng: Rng, progress: Progress
) -> tuple[dict[str, Any], Compared, dict[str, Float[np.ndarray, " W"]]]:
    """Report on the residual model, and return its certificate and the two highest rungs for others to be compared."""
    rows, contrast = joint.store.rows.numpy(), StoredContrast(joint.windows, joint.store)
    chunks, counts = ChunkRows.of(joint.windows, rows), subject.counts(joint.windows, rows)
    shown = joint.windows.are_first(rows).nonzero()[0][: subject.samples].tolist()  # of a window its first chunk
    folding = Folding(subject.corpus, shown, _VERSIONS, rng.child("texts"))
    cache = score_cache(subject, joint)
    for scores in scored_chunks(subject.residual, cache, folder / "scores", progress, rows=joint.batch):
        folding.add(scores)
    numbers, human = folding.numbers, torch.zeros(len(counts), 1, dtype=torch.long)
    report = residual_report(numbers, counts, chunks)
    ceiling = math.log(numbers.draws + 1) * len(counts) / report.windows  # nats per text
    if not has_log_prob(subject.lm):  # log Z itself is not reported
        note = gain_note(report.nats_per_sequence, ceiling, numbers.draws + 1)
        report = replace(report, verdict=note, doubt="")
    if subject.split in ("train", "validation"):
        used = "was trained on" if subject.split == "train" else "was chosen by"
        words = f"measured on {subject.split} text, which the energy {used}"
        report = replace(report, verdict=together(words, report.verdict))
    texts = {
        name: CountedText(picked(contrast, chosen), counts.documents)
        for name, chosen in {"human": human, "base": folding["base"], "joint": folding["joint"]}.items()
    }
    shares = shares_of_text(texts, training_text(subject.corpus), progress)
    found: dict[str, Any] = {
        "joint": report.to_json(),
        "draws_curve": draws_curve(folding["curve"], numbers.log_base, counts, numbers.draws),
        "densities": densities(folding["densities"], counts),
        "text": text_statistics(texts, shares),
        "nearer": nearer_to_human(shares, "joint"),
        "ranking": ranking_of(folding["ranking"], counts, numbers.draws, rng.child("ranking")),
        "by_position": _positions(subject, joint, folder, rng, progress),
        "samples": folding.samples,
        "examples": folding.examples,
    } | _written(subject, joint, folder, rng, progress)
    if joint.sequential is not None:
        others = {"base": numbers.log_base.numpy(), "resampling": numbers.log_p["certified"].numpy()}
        runs = conditional_runs(subject, joint, joint.sequential, folder, rng)
        found["sequential"] = sequential_report(runs, others, counts, chunks, progress)
    if not has_log_prob(subject.lm):
        curve = nats_curve(folding["curve"], numbers.draws, len(counts) / report.windows)
        found |= {"ceiling_nats": ceiling, "draws_curve": curve}
    log_p = {subject.rung: numbers.log_base.numpy(), ENERGY: numbers.log_p["certified"].numpy()}
    if chunks is not None:
        log_p = {name: chunks.summed(values) for name, values in log_p.items()}
        counts = subject.counts(subject.windows, joint.whole)
    return found, Compared(log_p[ENERGY], log_p[ENERGY], counts), log_p


def conditional_runs(
    subject: Subject, joint: ResidualSubject, sampler: Sequential, folder: Path, rng: Rng
) -> ConditionalRuns:
    """The runs that certify sequential Monte Carlo, on the windows that resampling is certified on."""
    return ConditionalRuns(
        model=subject.residual, windows=joint.windows, rows=joint.store.rows.numpy(), space=subject.corpus.space,
        sampler=sampler, folder=folder, rng=rng.child("sequential"),
    )  # fmt: skip


def writers(subject: Subject, joint: ResidualSubject) -> Writers:
    """Who writes whole texts: every rung and the residual model, in the chunks that it is measured in."""
    chunks, length = joint.windows.chunks, subject.corpus.space.length
    return Writers(
        rungs={**subject.below, subject.rung: subject.lm},
        model=subject.residual,
        chunk=length if chunks is None else int(chunks.sizes[0]),
        candidates=joint.store.per_prefix + 1,
    )


def written_rows(subject: Subject, joint: ResidualSubject) -> Integer[np.ndarray, " texts"]:
    """The whole windows after whose prefixes texts are written; chunk by chunk, samples have to be."""
    num = max(joint.texts, subject.samples) if joint.windows.chunks is not None else joint.texts
    return joint.whole[:num]


def _written(subject: Subject, joint: ResidualSubject, folder: Path, rng: Rng, progress: Progress) -> dict[str, Any]:
    """Whole texts after some of the prefixes, and what they show."""
    rows, who = written_rows(subject, joint), writers(subject, joint)
    if not len(rows):
        return {}
    with progress.track("texts of all models", len(rows), "prefixes") as advance:
        for row in rows.tolist():
            write_texts(who, subject.corpus, subject.windows, row, folder, rng)
            advance(1)
    report = written_report(who.names, subject.windows, rows, subject.corpus, subject.lm, folder, progress)
    shown = [text | {"base": text[subject.rung], "joint": text[ENERGY]} for text in report["texts"][: subject.samples]]
    return {"written": report} | ({} if joint.windows.chunks is None else {"samples": shown})


def _positions(
    subject: Subject, joint: ResidualSubject, folder: Path, rng: Rng, progress: Progress
) -> list[dict[str, Any]]:
    if not joint.position_windows:
        return []
    first = joint.store.rows[: joint.position_windows].numpy()
    return by_position(
        subject.residual,
        subject.windows.continuations(first),
        subject.windows.documents[first],
        subject.corpus.space,
        joint.position_draws,
        folder,
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
    """One baseline against the base on its windows, and against the certificate on the residual model's windows."""
    log_p = window_log_probs(lm, subject.windows, subject.rows, log_probs_folder(folder, name), name, progress)
    against_joint = None
    if on_certified is not None and subject.joint is not None:
        place = log_probs_folder(folder, name, is_certified=True)
        on_same = window_log_probs(lm, subject.windows, subject.joint.whole, place, name, progress)
        against_joint = on_certified._replace(baseline=on_same)
    return compare(on_rows._replace(baseline=log_p), against_joint, rng)
