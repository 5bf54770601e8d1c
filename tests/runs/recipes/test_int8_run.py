"""A run whose energy is read in int8 once it is trained."""

import torch

from freenergy import load, load_recipe, run
from freenergy.energies.int8 import Int8Linear

RECIPE = """
[negatives]
per_prefix = 2
windows = 8
validation_windows = 8
validation_per_prefix = 3
shard = 8
[energy]
kind = "unit"
int8 = true
[training]
negatives = 2
[training.optimisation]
steps = 4
batch_size = 4
validate_every = 4
"""
CHANGES = [
    "base.optimisation.steps=2",
    "base.optimisation.validate_every=2",
    "evaluation.candidates=4",
    "evaluation.certified_windows=2",
]


def test_it_is_trained_in_float32_and_read_in_int8(write_recipe, tmp_path):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + RECIPE)
    results = {result.name: result for result in run(load_recipe(str(path), CHANGES), tmp_path / "run")}
    (part,) = results["energy"].summary["parts"]
    assert 0 < part["int8_error"]["root_mean_square"] <= part["int8_error"]["largest"] < 1
    energy = load(tmp_path / "run").energy
    layers = [layer for layer in energy.trunk.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) == len(energy.ranges) > 0
    assert not any(isinstance(layer, torch.nn.Linear) for layer in energy.trunk.modules())
