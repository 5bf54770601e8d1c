"""Studies with made-up texts: no model has to write them."""

import pytest

from freenergy.apps.study import Store, Study, StudySettings
from freenergy.apps.study.items import Item


class Clock:
    """A time that tests set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def make_study():
    """A study of so many pairs; ``same`` of them are twice the same text."""

    def make(folder, pairs=6, *, same=0, **settings):
        chosen = StudySettings(**{"prefixes": pairs + same, "qualification": 4, **settings})
        kinds = ["pair"] * (pairs + same) + ["check"] * chosen.num_checks + ["qualification"] * chosen.qualification
        items = [
            Item(
                number=i, kind=kind, prefix=f"beginning {i}", a=f"dull {i}", b=f"{'dull' if i < same else 'bright'} {i}"
            )
            for i, kind in enumerate(kinds)
        ]
        models = {
            "a": {"name": "plain", "run": None, "law": "base"},
            "b": {"name": "tuned", "run": None, "law": "joint"},
        }
        return Study(folder=folder, settings=chosen, models=models, items=tuple(items)).write()

    return make


@pytest.fixture
def make_store(make_study, tmp_path, clock):
    """Its answers, in memory; the folder is there too."""
    opened = []

    def make(pairs=6, **settings):
        opened.append(Store(make_study(tmp_path / "study", pairs, **settings), in_memory=True, clock=clock))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture(scope="session")
def sides():
    """Answers to a page: the text that ``choose`` names at each place, by item."""

    def of(page, choose):
        return {i: 1 if place.first == choose(place.item) else 2 for i, place in enumerate(page.places)}

    return of
