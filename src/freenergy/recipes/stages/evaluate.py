"""``freenergy evaluate``: a run's own evaluation, or the same on other windows, with other draws, or on any text.

    RUN/evaluations/text-<fingerprint>/     a text that was given, as windows
    RUN/evaluations/draws-<fingerprint>/    the base's draws for prefixes of a split or text
    RUN/evaluations/<fingerprint>/          what was measured on them, with the energy that the run now has

What was measured is a stage in a folder that its key names. What is there is not made again, so an evaluation that was
interrupted resumes, and another energy is measured on the same draws.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.workers.local import InProcess
from freenergy.core.workers.protocol import WorkerPool
from freenergy.corpus import Corpus
from freenergy.evaluation.certified import check_draws, together
from freenergy.evaluation.shards import EvaluationShards
from freenergy.evaluation.summary import Subject
from freenergy.noise.store import Identity, NegativeStore
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.load import load_text_run
from freenergy.recipes.stages.candidates import draw_candidates
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.evaluation import (
    STAGE,
    SUMMARY,
    measured,
    open_all_baselines,
    read_summary,
    residual_subject,
)
from freenergy.recipes.stages.given_text import GIVEN, GivenText, given_text, measured_windows
from freenergy.recipes.stages.language_models import load_base, lower_rungs, rung_names
from freenergy.recipes.stages.negatives import BASE_ALONE, identify
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Step, is_current, run, working_in

_SILENT, _IN_PROCESS = Silent(), InProcess()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to measure. Left out: the recipe's split, its ``certified_windows`` and its candidates."""

    texts: tuple[Path, ...] = ()
    split: str | None = None
    windows: int | None = None
    candidates: int | None = None  # n, the true text among them
    baselines: bool = False

    @property
    def is_plain(self) -> bool:
        """True when it is what the run's own evaluation answers."""
        return not self.texts and (self.split, self.windows, self.candidates) == (None, None, None)


PLAIN = EvaluationRequest()


def evaluate(
    folder: str | Path,
    request: EvaluationRequest = PLAIN,
    progress: Progress = _SILENT,
    *,
    workers: WorkerPool = _IN_PROCESS,
) -> dict[str, Any]:
    """Measure a run's residual model, or read what was measured before; docs/evaluation.md describes the result."""
    this = load_text_run(folder, workers)
    if this.recipe.energy is None:
        raise UserError(
            f"the run in {folder} has no energy, so there is only its base to measure, which `freenergy run` does: add "
            "an [energy] section to its recipe and run it again"
        )
    if request.baselines and not this.recipe.baselines:
        raise UserError(f"the recipe of {folder} has no baselines: leave --baselines out, or add [[baselines]] to it")
    if request.texts and request.split is not None:
        raise UserError(f"a text has no split {request.split!r}: leave --split out, or --text")
    for name in ("corpus", *rung_names(this), "energy", *(("baselines",) if request.baselines else ())):
        this.finished(name)
    return _own(this, progress) if request.is_plain else _other(this, request, progress)


def _own(this: ResidualRun, progress: Progress) -> dict[str, Any]:
    """The stage ``evaluation``, done where it is not, or was done by other settings."""
    folder = this.stage("evaluation")
    if not (folder / "stage.json").is_file() or not is_current(STAGE, this):
        for _ in run(this.recipe, this.folder, stage="evaluation", progress=progress, workers=this.workers):
            pass
    return read_summary(this, folder)


def _other(this: ResidualRun, request: EvaluationRequest, progress: Progress) -> dict[str, Any]:
    settings = this.recipe.evaluation
    num = settings.certified_windows if request.windows is None else request.windows
    candidates = settings.candidates if request.candidates is None else request.candidates
    check_draws(candidates - 1)
    if num < 1:
        raise UserError(f"{num} windows were asked for: measure on at least one")
    corpus, split = open_corpus(this), request.split or settings.split
    if not request.texts:
        corpus.windows(split)  # refuses an unknown split before anything is written
    with working_in(this.folder):
        identity = identify(this, corpus, split, candidates - 1, BASE_ALONE)
        if not request.texts:
            return _measured(this, request, corpus, identity, num, progress)
        text = given_text(request.texts, this, corpus, progress)
        identity = replace(identity, split=GIVEN, corpus=text.fingerprint)
        summary = _measured(this, request, corpus, identity, num, progress)
        return _with_warning(summary, text, progress)


def _measured(
    this: ResidualRun, request: EvaluationRequest, corpus: Corpus, identity: Identity, num: int, progress: Progress
) -> dict[str, Any]:
    """Draw and measure what is not there yet, as a stage in a folder that is named by its key."""
    root, draws = this.folder / "evaluations", f"draws-{fingerprint([asdict(identity), num])}"
    read = ("energy", "baselines") if request.baselines else ("energy",)

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        opened = Opened(this, corpus, load_base(this, corpus))
        draw_candidates(opened, root / draws, num, identity, progress)
        arguments = folder.name, draws, identity, request.baselines
        summary = measured(this, _shards(opened, *arguments), job(this, _shards, read, *arguments), progress)
        write_json(folder / SUMMARY, summary)
        return summary

    plan = Plan({"draws": draws, "settings": this.recipe.evaluation}, work)
    step = Step("evaluate", plan, root, {name: str(this.finished(name)["key"]) for name in read})
    step = replace(step, folder=root / step.key)
    step.done(this.workers, progress)
    return read_summary(this, step.folder)


def _shards(opened: Opened, name: str, draws: str, identity: Identity, with_baselines: bool) -> EvaluationShards:
    """What is measured in the folder ``name`` on the draws in the folder ``draws``."""
    run, corpus, lm = opened
    store, whole = NegativeStore.open(run.folder / "evaluations" / draws, identity), corpus.in_chunks(())
    joint = residual_subject(run, corpus, lm, measured_windows(run, corpus, identity), store)
    subject = Subject(
        lm=lm,
        corpus=whole,
        windows=measured_windows(run, whole, identity),
        split=identity.split,
        rows=np.sort(joint.whole),
        samples=run.recipe.evaluation.samples,
        baselines=open_all_baselines(run, corpus) if with_baselines else {},
        below=lower_rungs(run, corpus),
        rung=rung_names(run)[-1],
        joint=joint,
    )
    return EvaluationShards(subject, run.folder / "evaluations" / name, Rng(run.recipe.seed).child("evaluation"))


def _with_warning(summary: dict[str, Any], text: GivenText, progress: Progress) -> dict[str, Any]:
    """Say so where the text, or a part of it, has been trained on."""
    shared = int(text.shared.sum())
    summary["shared_with_training"] = {"windows": shared, "of": len(text.shared), "ngram": text.ngram}
    if shared:
        words = (
            f"{shared} of the text's {len(text.shared)} windows share {text.ngram} tokens in a row with the training "
            "text: on those the numbers flatter"
        )
        progress.say(words)
        summary["joint"]["verdict"] = together(words, summary["joint"]["verdict"])
    return summary
