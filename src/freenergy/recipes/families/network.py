"""What the families have in common that train one network which maps a context to logits.

    data → base → measurement         base: the network, trained from fresh weights or from those of another run
    RUN/base/          training/   the weights
    RUN/measurement/   numbers.json, and what paired comparisons read

In a sweep, the control of a row is the row without E-ARM, for as many steps as cost the same CPU time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.networks.protocol import Data, Network
from freenergy.recipes.families import CommonRecipe
from freenergy.runs.folder import without_defaults
from freenergy.runs.run import Plan, Run, Stage, run
from freenergy.runs.sweep.rows import RowRecipe
from freenergy.training.checkpoint import restore_weights, save_weights
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.settings import TrainedNetwork
from freenergy.training.tasks.autoregressive import AutoregressiveTask

BASE, MEASUREMENT, TRAINING = "base", "measurement", "training"
_WEIGHTS, _EPOCH, _NUMBERS = "weights.safetensors", "epoch.json", "numbers.json"
_SHORT_LIVED = ("checkpoint.safetensors", "best.safetensors")  # of training: no use once the weights are kept
_SILENT = Silent()


class Domain(ABC):
    """What a network learns, and how it is judged: text, translations, images."""

    @abstractmethod
    def network(self, rng: Rng) -> Network:
        """Returns a network with fresh weights."""

    @abstractmethod
    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> Data:
        """Returns the rows of training and validation."""

    @abstractmethod
    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """Returns the numbers of a table row, by column, on the test split; ``folder`` gets what ``compare`` needs."""

    @abstractmethod
    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """Returns the differences ours − others with 95 % intervals, paired, over the folders of the same seeds."""

    def save(self, network: Network, folder: Path) -> None:
        """Write the weights."""
        save_weights(folder / _WEIGHTS, network.module)

    def is_saved(self, folder: Path) -> bool:
        """Returns whether the weights are written."""
        return (folder / _WEIGHTS).is_file()

    def restore(self, network: Network, folder: Path) -> None:
        """Read the weights."""
        restore_weights(folder / _WEIGHTS, network.module)


B = TypeVar("B", bound=TrainedNetwork)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecipe(CommonRecipe, RowRecipe, Generic[B]):
    """A recipe that trains one network."""

    base: B
    begin_from: str = ""  # a finished run of the same family whose weights training begins with, seen from this run

    @abstractmethod
    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages that prepare the data."""

    @abstractmethod
    def domain(self, run: "Run[Any]", progress: Progress) -> Domain:
        """Returns the domain, with the data that the run has prepared."""

    @abstractmethod
    def learning_inputs(self, progress: Progress) -> Any:
        """Returns what decides the training, apart from seed, ``base`` and the prepared data."""

    @abstractmethod
    def measuring_inputs(self) -> Any:
        """Returns what decides the numbers, apart from the network."""

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages in order."""
        return (*self.data_stages(), BASE_STAGE, MEASUREMENT_STAGE)

    def numbers(self, run: "Run[Any]") -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""
        return [(name, value) for name, value in run.finished(MEASUREMENT)["summary"]["numbers"]]

    def history(self, run: "Run[Any]") -> dict[str, Any]:
        """Returns how the training went; also of one that has diverged."""
        return training_history(run.stage(BASE))

    def compare(self, ours: "Sequence[Run[Any]]", others: "Sequence[Run[Any]]", rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds."""
        a, b = ([each.stage(MEASUREMENT) for each in side] for side in (ours, others))
        return self.domain(ours[0], _SILENT).compare(a, b, rng)

    def check_rows(self, rows: "Sequence[NetworkRecipe[B]]", folder: Path, progress: Progress) -> None:
        """Refuse, before anything is trained, a row that would end before its E-ARM begins."""
        for stage in self.data_stages()[-1:]:
            for _ in run(self, folder, stage=stage.name, progress=progress):
                pass
        domain = self.domain(Run(folder, self), progress)
        network = domain.network(Rng())
        for row in rows:
            steps = row.base.optimisation
            data = domain.data(batch_size=steps.batch_size, accumulate=steps.accumulate, rng=Rng())
            AutoregressiveTask(network, data, row.base.lm_loss).check(steps.steps)

    def check_first_row(self) -> None:
        """Refuse E-ARM in the row that all others are compared with."""
        if self.base.earm is not None:
            raise UserError("the base has E-ARM: leave recipe.base.earm out, and give E-ARM to a row")

    def control(self) -> "NetworkRecipe[B]":
        """Returns the recipe of a row's control; ``control_steps`` says how many steps it has."""
        if self.base.earm is None:
            raise UserError(
                "the row has a control but no E-ARM: a control is a row without its E-ARM, so leave control out or "
                "give it base.earm"
            )
        return replace(self, base=replace(self.base, earm=None))

    def with_steps(self, steps: int) -> "NetworkRecipe[B]":
        """Returns the recipe with other steps; the schedule is stretched to them."""
        return replace(self, base=replace(self.base, optimisation=replace(self.base.optimisation, steps=steps)))

    def control_steps(self, of: "Sequence[Run[Any]]", plain: "Mapping[str, Run[NetworkRecipe[B]]]") -> dict[str, Any]:
        """Returns how many steps of the control cost what the most expensive of its rows has cost.

        The cost of one step is taken from a row without E-ARM, with scheduled sampling where the control has it. Where
        there is none the first row stands in: its steps are cheaper, so the control gets more than its due.
        """
        spent = max(float(each.recipe.history(each)["cpu_seconds"]) for each in of)
        scheduled = self.base.scheduled is None
        alike = [name for name, each in plain.items() if (each.recipe.base.scheduled is None) == scheduled]
        name = (alike or list(plain))[0]
        one = median(record["cpu_seconds"] for record in read_records(plain[name].stage(BASE) / TRAINING))
        return {"steps": steps_for(spent, one), "cpu_seconds": spent, "step_seconds": one, "step_of": name}

    @property
    def is_plain(self) -> bool:
        """True when a step is one of cross-entropy alone."""
        return self.base.earm is None


def learning(settings: Any) -> dict[str, Any]:
    """Returns the settings that decide what is learned: those that the class does not list as ``MEASURING``."""
    return {name: value for name, value in without_defaults(settings).items() if name not in settings.MEASURING}


def measuring(settings: Any) -> dict[str, Any]:
    """Returns the settings that only measuring reads: a change of these trains nothing."""
    return {name: value for name, value in without_defaults(settings).items() if name in settings.MEASURING}


def steps_for(spent: float, one: float) -> int:
    """Returns how many steps of ``one`` second cost what was spent, at least one.

    >>> steps_for(100.0, 0.4), steps_for(0.1, 0.4)
    (250, 1)
    """
    return max(1, round(spent / one)) if one > 0 else 1


def _rng(run: Run[NetworkRecipe[Any]]) -> Rng:
    return Rng(run.recipe.seed).child("experiment")


def _plan_base(run: Run[NetworkRecipe[Any]], progress: Progress) -> Plan:
    start = _start(run)
    inputs = {
        "seed": run.recipe.seed,
        "base": run.recipe.base,
        "learning": run.recipe.learning_inputs(progress),
        "begin_from": None if start is None else start.finished(BASE)["key"],
    }
    return Plan(inputs, partial(_train, run))


def _start(run: Run[NetworkRecipe[Any]]) -> Run[NetworkRecipe[Any]] | None:
    name = run.recipe.begin_from
    return Run((run.folder / name).resolve(), run.recipe) if name else None


def _train(run: Run[NetworkRecipe[Any]], folder: Path, progress: Progress) -> dict[str, Any]:
    domain, start = run.recipe.domain(run, progress), _start(run)
    if not domain.is_saved(folder):
        network = domain.network(_rng(run).child("weights"))
        if start is not None:
            domain.restore(network, start.stage(BASE))
        _fit(network, domain, run, folder / TRAINING, progress)
        domain.save(network, folder)
    for name in _SHORT_LIVED:
        (folder / TRAINING / name).unlink(missing_ok=True)
    return training_history(folder)


def _fit(network: Network, domain: Domain, run: Run[NetworkRecipe[Any]], folder: Path, progress: Progress) -> None:
    """Rows of a sweep that begin alike see the same batches."""
    rng = _rng(run).child("continued" if run.recipe.begin_from else "base")
    steps = run.recipe.base.optimisation
    data = domain.data(batch_size=steps.batch_size, accumulate=steps.accumulate, rng=rng.child("data"))
    write_json(folder / _EPOCH, {"steps": data.epoch_steps})
    task = AutoregressiveTask(network, data, run.recipe.base.lm_loss)
    task.check(steps.steps)
    label = f"{run.recipe.name}, seed {run.recipe.seed}"
    fit_watched(task, steps, folder, rng.child("steps"), progress, label)


def training_history(folder: Path) -> dict[str, Any]:
    """Returns how the training in the folder of stage ``base`` went."""
    records = read_records(folder / TRAINING)
    best = next((record for record in reversed(records) if record["is_best"]), {"step": None, "validation": None})
    return {
        "steps": len(records),
        "best_step": best["step"],
        "validation": best["validation"],
        "cpu_seconds": math.fsum(record["cpu_seconds"] for record in records),
        "epoch_steps": read_json(folder / TRAINING / _EPOCH)["steps"],
    }


def _plan_measurement(run: Run[NetworkRecipe[Any]], progress: Progress) -> Plan:
    return Plan({"settings": run.recipe.measuring_inputs()}, partial(_measure, run))


def _measure(run: Run[NetworkRecipe[Any]], folder: Path, progress: Progress) -> dict[str, Any]:
    domain = run.recipe.domain(run, progress)
    network = domain.network(_rng(run).child("weights"))
    domain.restore(network, run.stage(BASE))
    network.module.eval()
    found = domain.measure(network, folder, _rng(run).child("measure"), progress)
    # pairs, since the order of the columns is worth keeping and JSON objects are written sorted
    numbers = [[name, float(value) if math.isfinite(value) else None] for name, value in found.items()]
    write_json(folder / _NUMBERS, {"numbers": numbers})
    return {"numbers": numbers}


BASE_STAGE = Stage(BASE, _plan_base, after=("corpus",))
MEASUREMENT_STAGE = Stage(MEASUREMENT, _plan_measurement, after=("corpus", "base"))
