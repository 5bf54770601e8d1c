"""A world of a few strings where every law can be summed over, and a real model with a space that can."""

import pytest

from freenergy.testing.enumerating import World, total_variation


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
