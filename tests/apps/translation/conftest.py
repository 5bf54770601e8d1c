"""A toy language: animals see things, every word has one translation."""

import pytest

from freenergy.apps.translation.settings import TranslationSettings
from freenergy.apps.translation.translator import build
from freenergy.core.rng import Rng

SLOTS = (
    [("", ""), ("green ", "grüner "), ("small ", "kleiner ")],
    [("dog", "Hund"), ("cat", "Kater"), ("bear", "Bär")],
    [("a door", "eine Tür"), ("a house", "ein Haus"), ("trees", "Bäume")],
)


def sentences(count, seed):
    rows = (Rng(seed).uniform(count, 3) * 3).int().tolist()
    chosen = [[slot[i] for slot, i in zip(SLOTS, row, strict=True)] for row in rows]
    english = [f"A {colour[0]}{animal[0]} sees {thing[0]}." for colour, animal, thing in chosen]
    return english, [f"Ein {colour[1]}{animal[1]} sieht {thing[1]}." for colour, animal, thing in chosen]


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A folder of pairs."""
    folder = tmp_path_factory.mktemp("toy")
    for seed, (split, count) in enumerate({"train": 60, "val": 12, "test_2016_flickr": 16}.items()):
        for language, lines in zip(("en", "de"), sentences(count, seed), strict=True):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_tiny():
    """Networks of a few tokens with large weights, in float64; 0 is EOS."""

    def make(vocab_size):
        sizes = TranslationSettings(path="-", layers=1, width=8, heads=2, feedforward=12, dropout=0.3, longest=12)
        network = build(sizes, vocab_size=vocab_size, eos=0, rng=Rng(1))
        network.module.double().eval()
        for weight in network.module.parameters():
            if weight.dim() > 1:
                weight.data.mul_(25.0)
        return network

    return make


@pytest.fixture
def tiny(make_tiny):
    """Of four tokens."""
    return make_tiny(4)
