"""A world of a few strings where every law can be summed over, and a real model with a space that can."""

import importlib.util
from pathlib import Path

import pytest

from freenergy import HuggingFaceLM, Sequences
from freenergy.testing.worlds import World, total_variation


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
