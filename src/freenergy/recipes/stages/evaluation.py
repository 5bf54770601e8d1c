"""Stage ``evaluation``: how good base, residual model and baselines are on held-out text, and what they write."""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.workers.shards import ShardJob, prefetch_shards
from freenergy.corpus import Corpus, Windows
from freenergy.energies.load import load_energy
from freenergy.evaluation.perplexity import choose_windows
from freenergy.evaluation.shards import EvaluationShards
from freenergy.evaluation.summary import ResidualSubject, Subject, measure
from freenergy.noise.store import NegativeStore
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.candidates import open_candidates
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.energy import MODEL
from freenergy.recipes.stages.language_models import RUNGS, load_base, lower_rungs, rung_names
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Stage

SUMMARY = "evaluation.json"
RUNG_STAGES = {"energy": ("negatives", "energy")}  # the stages that a rung costs, where they are not called like it


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    inputs = {"seed": run.recipe.seed, "settings": run.recipe.evaluation}
    return Plan(inputs, partial(_work, run))


def _work(run: ResidualRun, folder: Path, progress: Progress) -> dict[str, Any]:
    corpus = open_corpus(run)
    lm = load_base(run, corpus)
    summary = measured(run, _shards(Opened(run, corpus, lm)), job(run, _shards, read_stages(run)), progress)
    write_json(folder / SUMMARY, summary)
    return summary


def read_stages(run: ResidualRun) -> tuple[str, ...]:
    """Return the stages of a run that an evaluation reads, apart from its base."""
    return tuple(stage.name for stage in run.recipe.stages() if stage.name in STAGE.after and stage.name not in RUNGS)


def measured(run: ResidualRun, shards: EvaluationShards, work: ShardJob, progress: Progress) -> dict[str, Any]:
    """The summary of an evaluation, whose slow shards the run's workers make first."""
    prefetch_shards(run.workers, work, shards.missing(), shards.folder, "scores of windows and candidates", progress)
    return measure(shards.subject, shards.folder, shards.rng, progress)


def _shards(opened: Opened) -> EvaluationShards:
    """What the stage measures."""
    run, corpus, lm = opened
    settings, rng, whole = run.recipe.evaluation, Rng(run.recipe.seed).child("evaluation"), corpus.in_chunks(())
    windows, joint = whole.windows(settings.split), None
    if run.recipe.energy is not None:
        joint = residual_subject(run, corpus, lm, corpus.windows(settings.split), open_candidates(run, corpus))
    subject = Subject(
        lm=lm,
        corpus=whole,
        windows=windows,
        split=settings.split,
        rows=choose_windows(len(windows), settings.windows, settings.split, rng.child("windows")),
        samples=settings.samples,
        baselines=open_all_baselines(run, corpus),
        below=lower_rungs(run, corpus),
        rung=rung_names(run)[-1],
        joint=joint,
    )
    return EvaluationShards(subject, run.stage("evaluation"), rng)


def residual_subject(
    run: ResidualRun, corpus: Corpus, lm: LanguageModel, windows: Windows, store: NegativeStore
) -> ResidualSubject:
    """The run's energy, with the windows and draws that it is measured on."""
    return ResidualSubject(
        energy=load_energy(run.stage("energy") / MODEL, base=lm, tokenizer=corpus.tokenizer),
        windows=windows,
        store=store,
        features=run.features,
        batch=run.recipe.training.rows,
        position_windows=run.recipe.evaluation.position_windows,
        position_draws=run.recipe.evaluation.position_draws,
    )


def open_all_baselines(run: ResidualRun, corpus: Corpus) -> dict[str, LanguageModel]:
    """The baselines of the recipe, by name."""
    if not run.recipe.baselines:
        return {}
    from freenergy.recipes.stages.baselines import open_baselines

    return open_baselines(run, corpus)


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
        from freenergy.recipes.stages.baselines import baseline_records

        for name, record in baseline_records(run).items():
            summary["baselines"][name] |= {key: record.get(key) for key in ("parameters", "cpu_seconds")}
    return summary


_TIMES = ("seconds", "cpu_seconds")
STAGE = Stage("evaluation", _plan, after=(*RUNGS, "energy", "candidates", "baselines"))
