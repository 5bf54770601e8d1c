"""A finished run as the report sees it: a recipe, records of stages, and an evaluation whose numbers are made up."""

import json
from copy import deepcopy

import numpy as np
import pytest

from freenergy.core.files import write_json
from freenergy.core.progress import Silent
from freenergy.recipes import Run
from freenergy.recipes.load import make_recipe
from freenergy.runs.run import Step
from freenergy.training.baselines.making import RECORD

RECIPE = {
    "name": "made up",
    "about": "a test of the report",
    "corpus": {"source": "text <&> more.txt", "test_share": 0.1},
    "base": {"kind": "ngram", "order": 3},
    "energy": {"kind": "product", "parts": [{"kind": "ngram", "order": 3}, {"kind": "probe"}]},
    "baselines": [{"kind": "balm", "preset": "tiny"}],
}
BAD = "<script>document.title = 'taken over'</script><img src='http://localhost:9/x.png'>"


def _joint():
    bounds = {"lower": 24.1, "upper": 24.9, "certified": 25.2}
    return {
        "perplexity": bounds,
        "interval": {name: [value - 1.1, value + 1.2] for name, value in bounds.items()},
        "per_word": {name: 3 * value for name, value in bounds.items()},
        "per_byte": {name: value / 10 for name, value in bounds.items()},
        "gain": {"nats_per_sequence": 5.52, "percent": 12.9, "interval": [12.7, 13.0], "nats_interval": [5.4, 5.6],
                 "ceiling_percent": 21.3},
        "draws": 255, "windows": 40, "ess": 31.4, "largest_share": 0.173, "k_hat": 0.61, "verdict": "",
        "nce_accuracy": 0.81, "pair_accuracy": 0.88, "base_perplexity": 28.9,
        "log_partition": {"lower": -0.31, "upper": -0.22, "jackknife": -0.27, "standard_error": 0.02},
    }  # fmt: skip


def _text(shift):
    def share(value):
        return [value, value - 0.02, value + 0.02]

    orders = {"2": share(0.62 + shift), "3": share(0.83 + shift), "4": share(0.91 + shift)}
    unseen = {"2": share(0.1), "3": share(0.4), "4": share(0.7)}
    return {"distinct": orders, "repetition": share(0.05), "unseen": unseen, "windows": 40, "tokens": 1600}


def make_evaluation():
    """Every part of the object that ``freenergy evaluate --json`` prints."""
    rng = np.random.default_rng(0)
    means = {"human": -3.3, "base": -2.9, "joint": -3.2}
    densities = {
        model: {name: rng.normal(mean + shift, 0.4, 40).tolist() for name, mean in means.items()}
        for model, shift in (("base", 0.0), ("joint", 0.1))
    }
    apart = {model: {"base": [-0.4, -0.5, -0.3], "joint": [-0.1, -0.2, 0.0]} for model in ("base", "joint")}
    example = {
        kind: {"text": f" the {kind} ending {BAD}", "energy": energy, "log_base": -100.0 - energy}
        for kind, energy in (("human", -3.1), ("best", -4.5), ("typical", 0.2), ("worst", 6.0))
    }
    return {
        "split": "test", "windows": 400, "documents": 60, "tokens": 16_000,
        "base": {"perplexity": {"token": 28.4, "word": 88.0, "byte": 2.7}, "windows": 400,
                 "interval": {"token": [27.1, 29.9], "word": [80.0, 97.0], "byte": [2.5, 2.9]}},
        "joint": _joint(),
        "baselines": {"balm": {
            "perplexity": 26.0, "interval": [25.0, 27.0], "per_word": 80.0, "per_byte": 2.6,
            "against_base": {"percent": 8.0, "interval": [7.0, 9.0]},
            "against_joint": {"percent": -5.0, "interval": [-6.0, -4.0]}, "verdict": ""}},
        "text": {"human": _text(0.0), "base": _text(-0.08), "joint": _text(-0.03)},
        "densities": {**densities, "difference_of_means": apart},
        "draws_curve": [{"draws": 2**k, "lower": 24.1 - 6 / 2**k, "upper": 24.9 + 400 / 4**k, "base": 28.9,
                         "certified": max(25.2, 28.9 * (1 - 0.02 * k))} for k in range(1, 9)],
        "by_position": [{"position": t, "base": 30.0, "joint": 26.0, "gain_percent": 4 + 0.3 * t,
                         "interval": [2 + 0.3 * t, 6 + 0.3 * t]} for t in range(1, 41)],
        "examples": [{"prefix": f"Once upon {BAD}", **example}],
        "samples": [{"prefix": "Long ago", "human": " in the north", "base": f" {BAD}", "joint": " there was",
                     "log_base": -20.0}],
    }  # fmt: skip


@pytest.fixture(scope="session")
def all_measured():
    """Makes such an object."""
    return make_evaluation


@pytest.fixture
def evaluation(all_measured):
    return all_measured()


@pytest.fixture(scope="session")
def write_run():
    """Puts a run with an evaluation into a folder."""

    def write(folder, evaluation, **changes):
        run = Run(folder, make_recipe(deepcopy(RECIPE) | changes))
        write_json(folder / "recipe.json", json.loads(json.dumps(run.recipe.to_json())))
        for i, stage in enumerate(run.recipe.stages()):
            key = f"{i:016x}"
            if stage.name == "evaluation":
                key = Step(stage.name, stage.plan(run, Silent()), folder, {}).key
            record = {"key": key, "after": {}, "versions": {"freenergy": "0.1.0", "python": "3.11.2"}}
            summary = {"fingerprint": "f" * 16} if stage.name in ("base", "energy") else {}
            record |= {"summary": summary, "seconds": 60.0 * i, "cpu_seconds": 90.0 * i}
            made = folder / stage.name / "balm" / RECORD
            if stage.name == "baselines":
                write_json(made, {"parameters": 12_000, "cpu_seconds": 240.0})
            write_json(folder / stage.name / "stage.json", record)
        write_json(folder / "evaluation" / "evaluation.json", evaluation)
        return run

    return write
