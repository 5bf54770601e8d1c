"""One job in a folder of its own: train, keep the weights, measure. Killed anywhere, it goes on and ends the same.

    DIR/seed-S/ROW/   training/   weights.safetensors   measured/   row.json

``begun.json`` names what the folder is made of; a folder that was begun with other settings is emptied first. Every
file appears whole, ``row.json`` last: while its key is the same, nothing is done again. A control's steps

    steps = (CPU seconds of all steps of the E-ARM row) / (median CPU seconds of a step without E-ARM, same seed)

depend on a clock, so they are decided once and kept (``control.json``).
"""

import importlib.metadata
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, final

from freenergy.core.errors import DivergenceError, UserError
from freenergy.core.files import atomic_write, fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Network
from freenergy.recipes.experiment.plan import BASE, Job, labelled
from freenergy.recipes.experiment.subject import Subject
from freenergy.training.checkpoint import restore_weights, save_weights
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.settings import Optimisation
from freenergy.training.tasks.autoregressive import AutoregressiveTask

ROW, MEASURED, TRAINING, NUMBERS = "row.json", "measured", "training", "numbers.json"
_BEGUN, _CONTROL, _WEIGHTS = "begun.json", "control.json", "weights.safetensors"
_SHORT_LIVED = ("checkpoint.safetensors", "best.safetensors")  # of training: no use once the weights are kept


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the jobs of one seed and subject are done."""

    subject: Subject
    folder: Path
    seed: int
    jobs: tuple[Job, ...]
    learning: Any  # what decides the training: the subject's settings and data
    measuring: Any  # what decides the numbers beside it
    variant: str
    progress: Progress

    @property
    def rng(self) -> Rng:
        """All the randomness of the seed."""
        return Rng(self.seed).child("experiment")

    def of(self, job: Job) -> Path:
        """The folder of a job."""
        return self.folder / job.folder

    def key(self, job: Job) -> str:
        """Names what a job's training is made of."""
        made_of = [importlib.metadata.version("freenergy"), self.seed, self.learning, repr(self.jobs[0]), repr(job)]
        return fingerprint(made_of)

    def label(self, job: Job) -> str:
        """What a bar says."""
        return f"{labelled(self.variant, job.name)}, seed {self.seed}"


def check(jobs: Sequence[Job], subject: Subject) -> None:
    """Refuse, before anything is trained, a job that would end before its E-ARM begins."""
    network = subject.network(Rng())
    for job in jobs:
        steps = job.optimisation
        data = subject.data(batch_size=steps.batch_size, accumulate=steps.accumulate, rng=Rng())
        AutoregressiveTask(network, data, job.teaching).check(steps.steps)


def do(job: Job, place: Place) -> dict[str, Any]:
    """The record of a finished job, which is done unless it was."""
    folder, key = place.of(job), place.key(job)
    row_key = fingerprint([key, place.measuring])
    is_kept = job.name != BASE or (folder / _WEIGHTS).is_file()  # the others need its weights
    if is_kept and (folder / ROW).is_file() and (done := read_json(folder / ROW)).get("key") == row_key:
        return done
    _begin(folder, key)
    record: dict[str, Any] = {"key": row_key, "name": job.name, "diverged": None}
    try:
        network = _trained(job, place)
        record["numbers"] = _measured(network, job, place, row_key)
    except DivergenceError as error:
        if job.kind == "base":  # there is nothing to go on from
            raise
        record |= {"numbers": {}, "diverged": str(error)}
    record |= _history(folder)
    write_json(folder / ROW, record)
    place.progress.say(f"{place.label(job)}: {_line(place.subject.main_column, record)}")
    return record


def _line(column: str, record: dict[str, Any]) -> str:
    if record["diverged"]:
        return str(record["diverged"])
    value = record["numbers"].get(column)
    told = "–" if value is None else f"{value:.4g}"
    return f"{column} {told}, {record['steps']} steps, {record['cpu_seconds'] / 60:.1f} CPU minutes"


def _begin(folder: Path, key: str) -> None:
    """Go on in a folder of the same key; empty one of another, never one that no experiment has made."""
    begun = folder / _BEGUN
    if begun.is_file() and read_json(begun).get("key") == key:
        return
    if folder.exists() and any(folder.iterdir()):
        if not begun.is_file():
            raise UserError(f"{folder} holds files that no experiment has made: move them, or choose another --out")
        # under another name first: what a kill has left half removed must not count as done, but be swept
        doomed = folder.with_name(f".{folder.name}.old.part")
        folder.rename(doomed)
        shutil.rmtree(doomed)
    write_json(begun, {"key": key})


def _trained(job: Job, place: Place) -> Network:
    """The network with the weights that the job ends with."""
    folder, rng = place.of(job), place.rng
    network = place.subject.network(rng.child("weights"))
    if (folder / _WEIGHTS).is_file():
        restore_weights(folder / _WEIGHTS, network.module)
    else:
        if not job.scratch:
            restore_weights(place.folder / BASE / _WEIGHTS, network.module)
        _train(network, job, place, _optimisation(job, place))
        save_weights(folder / _WEIGHTS, network.module)
    for name in _SHORT_LIVED:
        (folder / TRAINING / name).unlink(missing_ok=True)
    return network


def _train(network: Network, job: Job, place: Place, steps: Optimisation) -> None:
    folder, rng = place.of(job) / TRAINING, place.rng.child(job.stream)
    data = place.subject.data(batch_size=steps.batch_size, accumulate=steps.accumulate, rng=rng.child("data"))
    write_json(folder / "epoch.json", {"steps": data.epoch_steps})
    task = AutoregressiveTask(network, data, job.teaching)
    fit_watched(task, steps, folder, rng.child("steps"), place.progress, place.label(job))


def _optimisation(job: Job, place: Place) -> Optimisation:
    """As planned; a control's schedule is stretched to its own steps."""
    return replace(job.optimisation, steps=_control_steps(job, place)) if job.of else job.optimisation


def _control_steps(job: Job, place: Place) -> int:
    path = place.of(job) / _CONTROL
    if not path.is_file():
        spent = max(_cpu_seconds(place.of(other)) for other in job.of)
        like = _like(job, place)
        one = median(record["cpu_seconds"] for record in read_records(place.of(like) / TRAINING))
        found = {"steps": steps_for(spent, one), "cpu_seconds": spent, "step_seconds": one, "step_of": like.name}
        write_json(path, found)
    return int(read_json(path)["steps"])


def steps_for(spent: float, one: float) -> int:
    """How many steps of ``one`` second cost what was spent, at least one.

    >>> steps_for(100.0, 0.4), steps_for(0.1, 0.4)
    (250, 1)
    """
    return max(1, round(spent / one)) if one > 0 else 1


def _like(job: Job, place: Place) -> Job:
    """A job whose steps cost what a control's will: no E-ARM, and the second pass of scheduled sampling where it has.

    Where there is none the base stands in. Its steps are cheaper then, so the control gets more than its due.
    """
    for other in place.jobs:
        is_plain = other.teaching.earm is None and not other.of
        if is_plain and (other.teaching.scheduled is None) == (job.teaching.scheduled is None):
            return other
    return place.jobs[0]


def _cpu_seconds(folder: Path) -> float:
    return math.fsum(record["cpu_seconds"] for record in read_records(folder / TRAINING))


def _measured(network: Network, job: Job, place: Place, key: str) -> dict[str, float | None]:
    """The numbers of the row; the folder with what they come from is whole or absent."""
    folder = place.of(job) / MEASURED
    if not (folder / NUMBERS).is_file() or read_json(folder / NUMBERS).get("key") != key:
        network.module.eval()
        with atomic_write(folder) as aside:
            aside.mkdir()
            found = place.subject.measure(network, aside, place.rng.child("measure"), place.progress)
            numbers = {name: float(value) if math.isfinite(value) else None for name, value in found.items()}
            # pairs, since the order of the columns is worth keeping and JSON objects are written sorted
            write_json(aside / NUMBERS, {"key": key, "numbers": list(numbers.items())})
    return dict(read_json(folder / NUMBERS)["numbers"])


def columns_of(folder: Path) -> list[str]:
    """The columns of a measured job, in the order of its subject; none of one that has diverged."""
    if not (folder / MEASURED).is_dir():
        return []
    return [name for name, _ in read_json(folder / MEASURED / NUMBERS)["numbers"]]


def _history(folder: Path) -> dict[str, Any]:
    """How the training went."""
    records = read_records(folder / TRAINING)
    best = next((record for record in reversed(records) if record["is_best"]), {"step": None, "validation": None})
    control = read_json(folder / _CONTROL) if (folder / _CONTROL).is_file() else None
    return {
        "steps": len(records),
        "best_step": best["step"],
        "validation": best["validation"],
        "cpu_seconds": _cpu_seconds(folder),
        "epoch_steps": read_json(folder / TRAINING / "epoch.json")["steps"],
    } | ({} if control is None else {"control": control})
