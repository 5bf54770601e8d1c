"""A family so small that a sweep over it takes no time: rows of a Markov chain over three tokens."""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

from freenergy.core.files import read_json, write_json
from freenergy.evaluation.perplexity import measured_rate
from freenergy.lm.networks.protocol import Batch
from freenergy.recipes.families import FAMILIES, network
from freenergy.recipes.families.network import Domain, NetworkRecipe, learning, measuring
from freenergy.recipes.load import make_experiment
from freenergy.runs.sweep.run import run_sweep
from freenergy.training.settings import TrainedNetwork

V, T, CONTROL_STEPS = 3, 6, 9
CHAIN = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.4, 0.1, 0.5]])


class Killed(BaseException):
    """The end of a life."""


class Bigram:
    """Logits by the token before."""

    def __init__(self, rng):
        self.module = nn.Embedding(V + 1, V)  # the last row is the start
        with torch.no_grad():
            self.module.weight.copy_(rng.normal(V + 1, V) * 0.1)
        self.vocab_size = V

    def logits(self, given, tokens):
        start = torch.full((len(tokens), 1), V)
        return self.module(torch.cat([start, tokens[:, :-1]], 1))

    @torch.no_grad()
    def draw(self, given, known, length, rng):
        row = known
        for k in range(length):
            logits = self.logits(None, torch.cat([row, torch.zeros(len(row), 1, dtype=torch.long)], 1))[:, -1]
            row = torch.cat([row, rng.child("token", k).categorical(logits).unsqueeze(1)], 1)
        drawn = row[:, known.shape[1] :]
        return drawn, torch.ones_like(drawn, dtype=torch.bool)


def rows(count, rng):
    first = rng.child("first").categorical(torch.zeros(count, V))
    found = [first]
    for t in range(T - 1):
        found.append(rng.child("next", t).categorical(CHAIN.log()[found[-1]]))
    return torch.stack(found, 1)


class Chain:
    """Rows of the chain; ``life`` is how many batches may be read before the process dies."""

    epoch_steps = 4

    def __init__(self, batch_size, accumulate, rng, life):
        self.size, self.rng, self.life = batch_size // accumulate, rng, life

    def batch(self, step, micro):
        self.life.spend()
        tokens = rows(self.size, self.rng.child(step, micro))
        return Batch(None, tokens, torch.ones_like(tokens, dtype=torch.bool), 0)

    def held_out(self):
        tokens = rows(16, self.rng.child("held out"))
        yield Batch(None, tokens, torch.ones_like(tokens, dtype=torch.bool), 0)


class Life:
    """Counts events; at the last one the process is as good as killed."""

    def __init__(self, events=math.inf):
        self.events = events

    def spend(self):
        self.events -= 1
        if self.events < 0:
            raise Killed


class World(Domain):
    """The domain."""

    def __init__(self, life=None, fingerprint=""):
        self.life, self.fingerprint, self.compared = life or Life(), fingerprint, 0

    def network(self, rng):
        return Bigram(rng)

    def data(self, *, batch_size, accumulate, rng):
        return Chain(batch_size, accumulate, rng, self.life)

    def measure(self, network, folder, rng, progress):
        self.life.spend()
        tokens = rows(50, rng.child("test"))
        with torch.no_grad():
            log_q = network.logits(None, tokens).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        nats = -log_q.double().sum(1)
        write_json(folder / "nats.json", {"nats": nats.tolist()})
        self.life.spend()
        return {"nats": nats.mean().item(), "a thing without bounds": math.inf}

    def compare(self, ours, others, rng):
        self.compared += 1
        a, b = (np.mean([read_json(f / "nats.json")["nats"] for f in side], axis=0) for side in (ours, others))
        return {"nats": measured_rate(a - b, np.ones(len(a)))}


@dataclass(frozen=True)
class ChainSettings:
    MEASURING: ClassVar = ("candidates",)

    block: int = 4
    candidates: int = 3


@dataclass(frozen=True, kw_only=True)
class ChainRecipe(NetworkRecipe[TrainedNetwork]):
    """What a family of one's own needs."""

    main_column: ClassVar[str] = "nats"
    world: ClassVar[World] = World()

    family: Literal["chain"] = "chain"
    chain: ChainSettings = field(default_factory=ChainSettings)
    base: TrainedNetwork = field(default_factory=TrainedNetwork)

    def data_stages(self):
        return ()

    def domain(self, run, progress):
        return self.world

    def learning_inputs(self, progress):
        return [learning(self.chain), self.world.fingerprint]

    def measuring_inputs(self):
        return measuring(self.chain)


if "." not in __name__:  # pytest imports this file once more under a long name, to look for doctests
    FAMILIES["chain"] = f"{__name__}:ChainRecipe"


def recipe(**changes):
    """Base, two rows, one of them with a control."""
    steps = {"steps": 8, "batch_size": 4, "validate_every": 4, "warmup": 0, "checkpoint_seconds": 0.0}
    continued = {**steps, "steps": 6, "validate_every": 3, "learning_rate": 0.02}
    return {
        "name": "a chain",
        "seeds": [0, 1],
        "recipe": {"family": "chain", "base": {"optimisation": {**steps, "learning_rate": 0.05}}},
        "continued": {"base": {"optimisation": continued}},
        "rows": [
            {"name": "smooth", "set": {"base": {"label_smoothing": 0.1}}},
            {"name": "E-ARM", "control": True, "set": {"base": {"earm": {"length": 4, "start_epoch": 0}}}},
        ],
        **changes,
    }


def experiment(**changes):
    return make_experiment(recipe(**changes))


def run(folder, made=None, world=None):
    ChainRecipe.world = world or World()
    return run_sweep(made or experiment(), folder)


def contents(folder):
    """Every file of an experiment; clocks are left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (".lock", "control.json", "table.md"):
            found[str(path.relative_to(folder))] = _timeless(path)
    return found


def _timeless(path):
    if path.suffix == ".jsonl":
        return [strip(json.loads(line)) for line in path.read_text().splitlines()]
    return strip(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()


def strip(value):
    """Without what a clock has said."""
    if isinstance(value, dict):
        clocks = ("seconds", "cpu_seconds", "step_seconds", "budget", "files", "mark")
        return {key: strip(each) for key, each in value.items() if key not in clocks}
    return [strip(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    network.steps_for = lambda spent, one: CONTROL_STEPS
    slow = {"steps": 60, "batch_size": 4, "validate_every": 20, "warmup": 0, "checkpoint_seconds": 0.0}
    run(Path(sys.argv[1]), experiment(seeds=[0], continued={"base": {"optimisation": slow}}))
