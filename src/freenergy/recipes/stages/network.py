"""Stages ``base`` and ``measurement`` of the families that train one network.

RUN/base/          training/   the weights
RUN/measurement/   numbers.json, and what paired comparisons read
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Network
from freenergy.recipes.families.network import BASE, MEASUREMENT, TRAINING, Domain, NetworkRecipe
from freenergy.runs.run import Plan, Run, Stage
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.tasks.autoregressive import AutoregressiveTask

_EPOCH, _NUMBERS = "epoch.json", "numbers.json"
_SHORT_LIVED = ("checkpoint.safetensors", "best.safetensors")  # of training: no use once the weights are kept


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
    """Returns the run whose weights this one begins with."""
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
