"""An experiment in a folder: every job of every seed, the comparisons, the table.

    for each subject and seed:  base → rows → points of a study → controls;     then compare, then write

What is done already is not done again, whatever the process was killed at.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from freenergy.core.files import (
    disk_full_as_user_error,
    exclusive_lock,
    fingerprint,
    read_json,
    remove_partial_files,
    write_json,
    write_text,
)
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement
from freenergy.recipes.experiment.markdown import markdown
from freenergy.recipes.experiment.open import open_subject
from freenergy.recipes.experiment.plan import Experiment, Job, SubjectSettings, folder_name
from freenergy.recipes.experiment.rows import MEASURED, Place, check, columns_of, do
from freenergy.recipes.experiment.settings import parted
from freenergy.recipes.experiment.subject import Subject
from freenergy.recipes.experiment.table import Group, table

TABLE, MARKDOWN = "table.json", "table.md"
_SILENT = Silent()
Opener = Callable[[SubjectSettings, Path, Progress], Subject]


def run_experiment(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    progress: Progress = _SILENT,
    opener: Opener = open_subject,
) -> dict[str, Any]:
    """Do what is not done yet; the content of ``table.json``.

    The folder is ``runs/NAME`` unless ``out`` names another. ``opener`` finds a subject for its settings.
    """
    folder = folder_of(experiment, out)
    with exclusive_lock(folder), disk_full_as_user_error(folder):
        remove_partial_files(folder)
        groups = []
        for variant, settings in experiment.subjects.items():
            root = folder / folder_name(variant) if variant else folder
            groups.append(_group(experiment, variant, settings, root, progress, opener))
        found = table(experiment, groups, folder)
        write_json(folder / TABLE, found)
        write_text(folder / MARKDOWN, markdown(found))
    return read_json(folder / TABLE)


def folder_of(experiment: Experiment, out: str | Path | None) -> Path:
    """Where an experiment is done."""
    return Path(out) if out is not None else Path("runs") / folder_name(experiment.name)


def _group(
    experiment: Experiment, variant: str, settings: SubjectSettings, root: Path, progress: Progress, opener: Opener
) -> Group:
    """All seeds of one subject."""
    subject = opener(settings, root / "subject", progress)
    learning, measuring = parted(settings)
    jobs = experiment.jobs()
    check(jobs, subject)
    records: list[dict[str, dict[str, Any]]] = []
    for seed in experiment.seeds:
        place = Place(
            subject=subject,
            folder=root / f"seed-{seed}",
            seed=seed,
            jobs=tuple(jobs),
            learning=[type(settings).__name__, learning, getattr(subject, "fingerprint", "")],
            measuring=measuring,
            variant=variant,
            progress=progress,
        )
        records.append({job.name: do(job, place) for job in jobs})
    first = root / f"seed-{experiment.seeds[0]}"
    return Group(
        variant=variant,
        main_column=subject.main_column,
        columns=list(dict.fromkeys(name for job in jobs for name in columns_of(first / job.folder))),
        jobs=jobs,
        root=root,
        records=records,
        comparisons=_compared(experiment, subject, jobs, root, records, progress),
    )


def pairs(jobs: list[Job]) -> list[tuple[Job, Job]]:
    """Who is compared with whom: every job with its control, and with the base that was trained no more."""
    controls = [(of, job) for job in jobs for of in job.of]
    return [*controls, *((job, jobs[0]) for job in jobs[1:])]


def _compared(
    experiment: Experiment,
    subject: Subject,
    jobs: list[Job],
    root: Path,
    records: list[dict[str, dict[str, Any]]],
    progress: Progress,
) -> dict[tuple[str, str], dict[str, Measurement]]:
    """The subject's own comparisons, kept in files, since paired tests of translations take their time."""
    found = {}
    with progress.track("comparing", len(pairs(jobs)), "pairs") as advance:
        for ours, other in pairs(jobs):
            advance(1)
            if any(by[job.name]["diverged"] for by in records for job in (ours, other)):
                continue  # the table says so
            path = root / "comparisons" / f"{ours.folder}--{other.folder}.json"
            key = fingerprint([[by[job.name]["key"] for by in records] for job in (ours, other)])
            if not path.is_file() or read_json(path).get("key") != key:
                seeds = [root / f"seed-{seed}" for seed in experiment.seeds]
                a, b = ([seed / job.folder / MEASURED for seed in seeds] for job in (ours, other))
                rng = Rng(experiment.seeds[0]).child("compare", ours.folder, other.folder)
                made = subject.compare(a, b, rng)
                kept = [[name, each.to_json()] for name, each in made.items()]
                write_json(path, {"key": key, "differences": kept})
            differences = read_json(path)["differences"]
            found[ours.name, other.name] = {name: Measurement(*values) for name, values in differences}
    return found
