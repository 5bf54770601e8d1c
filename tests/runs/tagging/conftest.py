"""Files of the tiny world, and a recipe on them."""

import pytest

from tagged_world import sentences, write


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagging")
    for name, count, seed in (("train", 80, 0), ("dev", 20, 1), ("test", 30, 2)):
        write(folder / f"{name}.txt", sentences(count, seed))
    return folder


@pytest.fixture
def table(world):
    """A recipe on the tiny world."""
    data = {"train": str(world / "train.txt"), "validation": str(world / "dev.txt"), "test": str(world / "test.txt")}
    return {"family": "tagging", "name": "tiny", "data": data | {"columns": [1]}, "tagger": {"kind": "neural"}}
