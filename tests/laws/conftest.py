"""A world of a few strings where every law can be summed over, and a real model with a space that can."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, SequenceSpace, TabularLM
from freenergy.core.roles import ANCESTRAL


class World:
    """Strings of up to ``length`` tokens after the context [1], a base, and one energy a string; all its sums."""

    def __init__(self, tokens=3, *, length=2, eos=0, spread=1.0, seed=3):
        self.space = SequenceSpace(vocab_size=tokens, length=length, eos=eos)
        self.base = TabularLM.random(Rng(2), vocab_size=tokens, order=1)
        self.context = Sequences.from_lists([[1]])
        strings = self.space.enumerate()
        self.names = [tuple(x) for x in strings.lists()]
        self.x = Continuations(self.context, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
        self.log_base = self.base.log_prob(self.x)[0]
        self.energies = spread * Rng(seed).normal(len(self.names))
        self.reads = 0

    def energy(self, x: Continuations) -> torch.Tensor:
        """E of the table, whatever the context; counts what it reads."""
        self.reads += x.shape[0] * x.shape[1]
        rows = [[self.energies[self.names.index(tuple(string))] for string in strings] for strings in x.lists()]
        return torch.tensor(rows, dtype=torch.float64)

    def proposal(self, truncation=ANCESTRAL):
        """q of every string, token by token in plain Python."""
        return torch.tensor([self._chance(name, truncation) for name in self.names], dtype=torch.float64)

    def _chance(self, string, truncation):
        chance, written = 1.0, [1]
        for token in string:
            log_p = self.base.next_log_probs(Sequences.from_lists([written]))[0].tolist()
            mass = {v: math.exp(value / truncation.temperature) for v, value in enumerate(log_p)}
            ranked = sorted(mass, key=lambda v: -mass[v])[: truncation.top_k]
            total, kept, sum_kept = sum(mass[v] for v in ranked), [], 0.0
            for v in ranked:
                if sum_kept < (truncation.top_p or 1.0) * total:
                    kept.append(v)
                    sum_kept += mass[v]
            chance *= mass[token] / sum_kept if token in kept else 0.0
            written.append(token)
        return chance

    def weights(self, target="restricted", truncation=ANCESTRAL):
        """w of every string; 0 where the proposal cannot draw it."""
        q, factor = self.proposal(truncation), (-self.energies).exp()
        full = self.log_base.exp() / q.clamp(min=1e-300) * factor
        return torch.where(q > 0, factor if target == "restricted" else full, 0.0)

    def law(self, target="restricted", truncation=ANCESTRAL):
        """P of every string."""
        mass = self.proposal(truncation) * self.weights(target, truncation)
        return mass / mass.sum()

    def vector(self, law):
        """A dictionary of strings as a vector in the order of the names."""
        assert set(law) <= set(self.names)
        return torch.tensor([law.get(name, 0.0) for name in self.names], dtype=torch.float64)


def total_variation(p, q):
    return ((p - q).abs().sum() / 2).item()


@pytest.fixture
def make_world():
    return World


@pytest.fixture
def world():
    """Seven strings, with EOS."""
    return World()


@pytest.fixture
def tv():
    return total_variation


@pytest.fixture(scope="session")
def stories(real):
    """A trained model of 260 thousand weights and 512 tokens, and "Once upon a time" in its tokens."""
    folder = real("stories260K")
    spec = importlib.util.spec_from_file_location("llama2c", Path(__file__).parent / "lm" / "llama2c.py")
    llama2c = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama2c)
    pieces = llama2c.vocabulary(folder / "tok512.bin", 512)
    once = [1, *(pieces.index(piece) for piece in (" Once", " upon", " a", " time"))]
    return HuggingFaceLM(llama2c.load(folder / "stories260K.bin"), eos=1), Sequences.from_lists([once])
