"""Two ranks train small tasks in several ways and write down what they saw; ``test_ranks`` starts and judges them.

torchrun --nproc-per-node 2 ranks_worker.py FOLDER [short]
"""

import copy
import itertools
import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from freenergy import HuggingFaceLM, RankingNCE, Rng, Sequences, SequenceSpace, TabularLM
from freenergy.core import progress as interrupt
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.lm.networks.blocks import BlockData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.presets import Preset, build
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.objectives.earm import EARM
from freenergy.training.contrastive_batches import StoredContrast
from freenergy.training.distributed import wrap
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.loop import fit
from freenergy.training.settings import EnergyTraining, LanguageModelLoss, Optimisation
from freenergy.training.tasks.autoregressive import AutoregressiveTask
from freenergy.training.tasks.contrastive import ContrastiveTask

V, L, K, STEPS = 7, 4, 4, 50
SHAPE = Preset(family="neox", layers=2, heads=2, width=16, feedforward=32, context=32, about="for a test")
OPTIMISATION = Optimisation(
    steps=STEPS, batch_size=8, accumulate=4, learning_rate=5e-3, warmup=5, validate_every=10, ema=0.8
)  # fmt: skip


# at the other's learning rate this energy is chaotic: weights changed by one part in 10⁷ end 2·10⁻³ nats apart
CALM = replace(OPTIMISATION, learning_rate=1e-3)


def network(dropout):
    return build(SHAPE.config(vocab_size=V, eos=0, dropout=dropout), Rng(3))


def text(folder, earm=None, dropout=0.2):
    stream = (Rng(5).uniform(2000) ** 2 * V).long().numpy().astype(np.uint16)
    sizes = {"block": 8, "batch_size": 8, "accumulate": 4, "known": 2, "validation_tokens": 200}
    data = BlockData(stream, stream[:300], rng=Rng(6), **sizes)
    return AutoregressiveTask(CausalNetwork(network(dropout)), data, LanguageModelLoss(earm=earm))


def earm(folder):
    return text(folder, EARM(length=4, start_epoch=0.1))


def bit(folder):
    lm, truth = (TabularLM.random(Rng(seed), vocab_size=V, order=0, spread=1.0) for seed in (1, 2))
    space, count = SequenceSpace(vocab_size=V, length=L), 80
    stream = truth.sample(Sequences.from_lists([[i % V] for i in range(count)]), 1, space, Rng(3)).x.joined().tokens
    places = places_of(np.arange(count) * (1 + L), L, np.arange(count))
    windows = Windows(stream.numpy().ravel(), places, 1, L)
    stored = []
    for split, rows in (("train", torch.arange(60)), ("validation", torch.arange(60, 80))):
        marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
        identity = Identity(**marks, split=split, per_prefix=K, space=space)
        NegativeShards(folder / split, rows, windows, FromLM(lm, space), identity, Rng(5)).write(Silent())
        stored.append(StoredContrast(windows, NegativeStore.open(folder / split, identity)))
    energy = Bit.from_base(BitEnergy(dropout=0.1), HuggingFaceLM(network(0.0), eos=0))
    settings = EnergyTraining(negatives=2, optimisation=CALM)
    return ContrastiveTask(energy, *stored, RankingNCE(), settings, Rng(1))


TASKS = {"text": text, "earm": earm, "bit": bit}


@contextmanager
def environment(**changes):
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def alone():
    with environment(WORLD_SIZE="1"):
        yield


@contextmanager
def sharded():
    with environment(ACCELERATE_USE_FSDP="true"):
        yield


def train(name, scratch, folder, last=None):
    """The losses up to a step, or to the end; the task as it is then."""
    task = TASKS[name](scratch)
    records = itertools.islice(fit(task, CALM if name == "bit" else OPTIMISATION, folder, Rng(9)), last)
    return [record.loss for record in records], task


def is_plain(module):
    """Whether nothing of the distribution is left in a module."""
    copy.deepcopy(module)
    kinds = {type(weight) for weight in module.parameters()}
    return kinds == {nn.Parameter} and not any("FSDP" in type(each).__name__ for each in module.modules())


def weights_agree(module):
    flat = torch.cat([weight.detach().flatten() for weight in module.parameters()])
    every = RANKS.everyone(flat)
    return bool((every == every[0]).all())


def together():
    return environment()


WAYS = {"one": alone, "two": together, "sharded": sharded}


def in_all_ways(name, folder, scratch):
    """One task alone, on two ranks, and from each way to another; sharded for some steps, as gloo is slow at it."""
    told = {}
    with alone():  # each rank has a run of its own
        told["one"], single = train(name, scratch, folder / f"alone{RANKS.rank}")
    told["two"], double = train(name, scratch, folder / "two")
    told["ranks agree"] = weights_agree(double.module)
    told["weights"] = max_difference(single.module, double.module)
    relays = [("two", "one", STEPS), ("one", "two", 30), ("one", "sharded", 14), ("sharded", "one", 30)]
    for first, second, last in relays if name != "bit" else relays[:1] + relays[2:3]:
        told[f"{first} then {second}"] = relay(name, scratch, folder / f"{first} {second}", first, second, last)
    return told


def in_short(folder, scratch):
    """A few steps of one task, alone and together, and from two ranks to one."""
    with alone():
        one, _ = train("text", scratch, folder / f"alone{RANKS.rank}", 14)
    two, _ = train("text", scratch, folder / "two", 12)
    return {"one": one, "two": two, "two then one": relay("text", scratch, folder / "relay", "two", "one", 14)}


def relay(name, scratch, place, first, second, last):
    """Ten steps in one way, the rest in another; a rank by itself works on a copy of the folder."""
    folders = {way: place / (f"own{RANKS.rank}" if way == "one" else "shared") for way in WAYS}
    with WAYS[first]():
        losses, _ = train(name, scratch, folders[first], 10)
    RANKS.barrier()
    if folders[first] != folders[second] and (second == "one" or RANKS.is_first):
        shutil.copytree(folders[first], folders[second])
    RANKS.barrier()
    with WAYS[second]():
        return losses + train(name, scratch, folders[second], last - 10)[0]


def sharded_to_the_end(scratch, folder):
    """A short training by FSDP: what is left of it in the module, and its weights beside those of one rank."""
    short, ended = replace(OPTIMISATION, steps=6, validate_every=3), {}
    for way, place in (("one", f"own{RANKS.rank}"), ("sharded", "shared")):
        ended[way] = text(scratch)
        with WAYS[way]():
            list(fit(ended[way], short, folder / place, Rng(9)))
    plain, parted = ended["one"].module, ended["sharded"].module
    return {"is plain": is_plain(parted), "weights": max_difference(plain, parted)}


def max_difference(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def mutants(scratch, folder):
    """What a wrong distribution would look like, for ten steps."""
    told, seed = {}, torch.manual_seed
    plain = wrap.Spread.backward
    wrap.Spread.backward = lambda self, *args, share, is_last: plain(self, *args, share=share, is_last=False)
    told["gradients stay"], _ = train("text", scratch, folder / "gradients", 10)
    wrap.Spread.backward = plain
    torch.manual_seed = lambda number: seed(number + RANKS.rank)
    told["dropout by rank"], _ = train("text", scratch, folder / "dropout", 10)
    torch.manual_seed = seed
    return told


def stopped(scratch, folder):
    """The second rank is asked to stop in its seventh step."""
    seen = 0
    try:
        for record in fit(text(scratch), OPTIMISATION, folder, Rng(9)):
            seen = record.step
            if seen == 6 and not RANKS.is_first:
                interrupt._requested.set()
    except interrupt.Interrupted:
        interrupt._requested.clear()
        RANKS.barrier()
        rest, _ = train("text", scratch, folder)
        return {"after": seen, "rest": rest}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    RANKS = Ranks.found()
    scratch = out / f"scratch{RANKS.rank}"
    if sys.argv[2:] == ["short"]:
        told = in_short(out, scratch)
    else:
        told = {name: in_all_ways(name, out / name, scratch) for name in TASKS}
        told["mutants"] = mutants(scratch, out / "mutants")
        told["stopped"] = stopped(scratch, out / "stopped")
        told["sharded"] = sharded_to_the_end(scratch, out / "sharded")
    (out / f"told{RANKS.rank}.json").write_text(json.dumps(told))
