"""Stage ``evaluation``: how good base, residual model and baselines are on held-out text, and what they write.

``freenergy evaluate`` shows a run's own evaluation, or the same on other windows, with other draws, or on any text.

    RUN/evaluations/text-<fingerprint>/     a text that was given, as windows
    RUN/evaluations/draws-<fingerprint>/    the base's draws for prefixes of a split or text
    RUN/evaluations/<fingerprint>/          what was measured on them, with the energy that the run now has

What was measured is a stage in a folder that its key names. What is there is not made again, so an evaluation that was
interrupted resumes, and another energy is measured on the same draws.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Integer

from freenergy.core.checksums import STAGE as MANIFEST
from freenergy.core.checksums import write_with_checksums
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.workers.pool import InProcess, WorkerPool
from freenergy.core.workers.shards import ShardJob, prefetch_shards
from freenergy.corpus import Corpus, Windows
from freenergy.energies.registry import load_energy
from freenergy.evaluation.certified import check_draws, together
from freenergy.evaluation.perplexity import choose_windows
from freenergy.evaluation.shards import EvaluationShards
from freenergy.evaluation.summary import ResidualSubject, Subject, measure
from freenergy.noise.store import Identity, NegativeStore
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.load import load_text_run
from freenergy.recipes.stages.baselines import baseline_records, open_baselines
from freenergy.recipes.stages.candidates import draw_candidates, open_candidates
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.energy import MODEL
from freenergy.recipes.stages.given_text import GIVEN, GivenText, given_text, measured_windows
from freenergy.recipes.stages.language_models import RUNGS, load_base, lower_rungs, rung_names
from freenergy.recipes.stages.negatives import BASE_ALONE, identify
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Stage, Step, is_current, run, working_in

SUMMARY = "evaluation.json"
RUNG_STAGES = {"energy": ("negatives", "energy")}  # the stages that a rung costs, where they are not called like it
_TIMES = ("seconds", "cpu_seconds")
_SILENT, _IN_PROCESS = Silent(), InProcess()


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    inputs = {"seed": run.recipe.seed, "settings": run.recipe.evaluation}
    return Plan(inputs, partial(_work, run))


def _work(run: ResidualRun, folder: Path, progress: Progress) -> dict[str, Any]:
    corpus = open_corpus(run)
    opened = Opened(run, corpus, load_base(run, corpus))
    names = [stage.name for stage in run.recipe.stages()]
    read = tuple(name for name in names if name in STAGE.after and name not in RUNGS)
    return _measured(run, _shards(opened), job(run, _shards, read), progress)


def _measured(run: ResidualRun, shards: EvaluationShards, work: ShardJob, progress: Progress) -> dict[str, Any]:
    """Write the summary of an evaluation, whose slow shards the run's workers make first."""
    prefetch_shards(run.workers, work, shards.missing(), shards.folder, "scores of windows and candidates", progress)
    summary = measure(shards.subject, shards.folder, shards.rng, progress)
    write_json(shards.folder / SUMMARY, summary)
    return summary


def _shards(opened: Opened) -> EvaluationShards:
    run, corpus, _ = opened
    settings, joint = run.recipe.evaluation, None
    windows = corpus.in_chunks(()).windows(settings.split)
    rng = Rng(run.recipe.seed).child("evaluation", "windows")
    rows = choose_windows(len(windows), settings.windows, settings.split, rng)
    if run.recipe.energy is not None:
        joint = _residual_subject(opened, corpus.windows(settings.split), open_candidates(run, corpus))
    return _evaluation(opened, "evaluation", windows, settings.split, rows, joint)


def _request_shards(
    opened: Opened, name: str, draws: str, identity: Identity, with_baselines: bool
) -> EvaluationShards:
    """What is measured in the folder ``name`` on the draws in the folder ``draws``."""
    run, corpus, _ = opened
    store = NegativeStore.open(run.folder / "evaluations" / draws, identity)
    joint = _residual_subject(opened, measured_windows(run, corpus, identity), store)
    windows, place = measured_windows(run, corpus.in_chunks(()), identity), f"evaluations/{name}"
    rows = np.sort(joint.whole)
    return _evaluation(opened, place, windows, identity.split, rows, joint, with_baselines=with_baselines)


def _residual_subject(opened: Opened, windows: Windows, store: NegativeStore) -> ResidualSubject:
    """The run's energy, with the windows and draws that it is measured on."""
    run, corpus, lm = opened
    return ResidualSubject(
        energy=load_energy(run.stage("energy") / MODEL, base=lm, tokenizer=corpus.tokenizer),
        windows=windows,
        store=store,
        features=run.features,
        batch=run.recipe.training.rows,
        position_windows=run.recipe.evaluation.position_windows,
        position_draws=run.recipe.evaluation.position_draws,
        texts=run.recipe.evaluation.texts,
        sequential=run.recipe.evaluation.sequential,
    )


def _evaluation(
    opened: Opened,
    place: str,
    windows: Windows,
    split: str,
    rows: Integer[np.ndarray, " W"],
    joint: ResidualSubject | None,
    *,
    with_baselines: bool = True,
) -> EvaluationShards:
    """The run's rungs and baselines on the windows ``rows``, and its energy on draws of its own."""
    run, corpus, lm = opened
    subject = Subject(
        lm=lm,
        corpus=corpus.in_chunks(()),
        windows=windows,
        split=split,
        rows=rows,
        samples=run.recipe.evaluation.samples,
        baselines=open_baselines(run, corpus) if with_baselines and run.recipe.baselines else {},
        below=lower_rungs(run, corpus),
        rung=rung_names(run)[-1],
        joint=joint,
    )
    return EvaluationShards(subject, run.folder / place, Rng(run.recipe.seed).child("evaluation"))


def read_summary(run: ResidualRun, folder: Path) -> dict[str, Any]:
    """An evaluation with what each stage cost: times are no part of the file, which has the same bits in every run."""
    summary = read_json(folder / SUMMARY)
    base = summary.get("base")
    if not {"split", "windows", "baselines"} <= set(summary) or not isinstance(base, dict) or "interval" not in base:
        raise UserError(f"{folder / SUMMARY} is of another version of freenergy: delete its folder and run it again")
    records = {stage.name: run.stage(stage.name) / "stage.json" for stage in run.recipe.stages()}
    done = {name: read_json(path) for name, path in records.items() if path.is_file()}
    summary["cost"] = {name: {key: record.get(key) for key in _TIMES} for name, record in done.items()}
    for row in summary.get("ladder", ()):
        spent = [done.get(name, {}).get("cpu_seconds") for name in RUNG_STAGES.get(row["name"], (row["name"],))]
        row["cpu_seconds"] = sum(filter(None, spent)) if all(spent) else None
    if summary["baselines"]:
        for name, record in baseline_records(run).items():
            summary["baselines"][name] |= {key: record.get(key) for key in ("parameters", "cpu_seconds")}
    return summary


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
    if this.recipe.family == "random-field":
        from freenergy.recipes.stages.field_evaluation import evaluate_field

        return evaluate_field(this, request.split, request.candidates, bool(request.texts or request.windows), progress)
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
            return _drawn_and_measured(this, request, corpus, identity, num, progress)
        text = given_text(request.texts, this, corpus, progress)
        identity = replace(identity, split=GIVEN, corpus=text.fingerprint)
        summary = _drawn_and_measured(this, request, corpus, identity, num, progress)
        return _with_warning(summary, text, progress)


def _drawn_and_measured(
    this: ResidualRun, request: EvaluationRequest, corpus: Corpus, identity: Identity, num: int, progress: Progress
) -> dict[str, Any]:
    """Draw and measure what is not there yet, as a stage in a folder that is named by its key."""
    root, draws = this.folder / "evaluations", f"draws-{fingerprint([asdict(identity), num])}"
    read = ("energy", "baselines") if request.baselines else ("energy",)

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        opened = Opened(this, corpus, load_base(this, corpus))
        draw_candidates(opened, root / draws, num, identity, progress)
        if not (root / draws / MANIFEST).is_file():
            write_with_checksums(root / draws / MANIFEST, {"key": draws}, progress)
        arguments = folder.name, draws, identity, request.baselines
        wanted = job(this, _request_shards, read, *arguments)
        return _measured(this, _request_shards(opened, *arguments), wanted, progress)

    plan = Plan({"draws": draws, "settings": this.recipe.evaluation}, work)
    step = Step("evaluate", plan, root, {name: str(this.finished(name)["key"]) for name in read})
    step = replace(step, folder=root / step.key)
    step.done(this.workers, progress)
    return read_summary(this, step.folder)


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


STAGE = Stage("evaluation", _plan, after=(*RUNGS, "energy", "candidates", "baselines"))
