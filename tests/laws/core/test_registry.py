"""Parts by name: settings from text or values, and one sentence for what is wrong."""

from dataclasses import dataclass
from typing import Literal

import pytest

from freenergy import Truncation, UserError
from freenergy.core.registry import Registry, configured, setting_names
from freenergy.core.truncation import ANCESTRAL
from freenergy.samplers import Metropolis, Rejection, Resampling
from freenergy.samplers.chain import Chain
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.registry import KERNELS, SAMPLERS, sampler_named, sampler_settings


@dataclass(frozen=True, kw_only=True)
class Part:
    count: int
    rate: float = 0.5
    name: str = "n"
    is_on: bool = False
    way: Literal["up", "down"] = "up"
    limit: float | None = None
    truncation: Truncation = ANCESTRAL


def test_text_is_read_like_toml_and_values_are_taken():
    text = {"count": "3", "rate": "2", "name": "7", "is_on": "true", "way": "down", "limit": "1e-3"}
    found = configured(Part, text | {"truncation.top_k": "4"}, "the part")
    assert found == Part(
        count=3, rate=2.0, name="7", is_on=True, way="down", limit=1e-3, truncation=Truncation(top_k=4)
    )
    assert isinstance(found.rate, float)
    assert configured(Part, {"count": 3, "rate": 2, "limit": None, "truncation.top_p": 0.5}, "the part") == Part(
        count=3, rate=2.0, truncation=Truncation(top_p=0.5)
    )
    assert setting_names(Part)[-3:] == ["truncation.temperature", "truncation.top_k", "truncation.top_p"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cuont": 3}, "the part has no setting 'cuont': it has count, rate, name, is_on, way, limit, truncation.temp"),
        ({"truncation": 3}, "the part has no setting 'truncation'"),
        ({}, "the part needs count: set it, as in count=…"),
        ({"count": "many"}, "count is 'many': set it to a whole number"),
        ({"count": 2.5}, "count is 2.5: set it to a whole number"),
        ({"count": True}, "count is True: set it to a whole number"),
        ({"count": 1, "is_on": 1}, "is_on is 1: set it to true or false"),
        ({"count": 1, "way": "left"}, "way is 'left': set it to 'up' or 'down'"),
        ({"count": 1, "limit": "no"}, "limit is 'no': set it to a number"),
        ({"count": 1, "name": 3}, "name is 3: set it to a text"),
        ({"count": 1, "truncation.top_k": 0}, "top_k is 0: set it to 1 or more"),
    ],
)
def test_what_is_refused(settings, sentence):
    with pytest.raises(UserError) as error:
        configured(Part, settings, "the part")
    assert sentence in str(error.value)


def test_a_registry_imports_what_it_is_asked_for():
    parts = Registry[Part]("part", {"one": "freenergy.core.rng:Rng", "bad": "freenergy.core.rng:Nothing"})
    assert parts.find("one").__name__ == "Rng"
    with pytest.raises(UserError, match="there is no part 'two': choose one of one, bad"):
        parts.find("two")
    with pytest.raises(UserError, match=r"freenergy.core.rng:Nothing cannot be imported"):
        parts.find("bad")
    with pytest.raises(UserError, match=r"there is no part 'freenergy.core.rng:Rng'"):
        parts.find("freenergy.core.rng:Rng")
    assert parts.find("freenergy.core.rng:Rng", allow_import=True).__name__ == "Rng"
    parts.register("own", Part)
    parts.register("own", Part)
    assert "own" in parts
    assert parts.find("own") is Part
    with pytest.raises(UserError, match="there is a part 'own' already"):
        parts.register("own", Truncation)


def test_samplers_by_name():
    assert sampler_named("resampling") == Resampling()
    assert sampler_named("metropolis", {"steps": "9", "truncation.top_k": "3"}) == Metropolis(
        steps=9, truncation=Truncation(top_k=3)
    )
    assert sampler_named("rejection", {"log_bound": 2}) == Rejection(log_bound=2.0)
    chains = sampler_named("independence", {"steps": 7, "law": "model", "truncation.temperature": 2})
    assert chains == Chain(kernel=Independence(law="model", truncation=Truncation(temperature=2.0)), steps=7)
    assert sampler_named("freenergy.samplers.kernels.independence:Independence") == Chain(kernel=Independence())
    assert sampler_named("freenergy.samplers:Resampling", {"candidates": 4}) == Resampling(candidates=4)
    for name in (*SAMPLERS, *KERNELS):
        assert "truncation" not in sampler_settings(name)
    assert sampler_settings("independence")[0] == "steps"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("sampling", {}, "there is no sampler 'sampling': choose one of resampling, best-of-n,"),
        ("a:B", {}, "a:B cannot be imported"),
        ("resampling", {"steps": 3}, "the sampler resampling has no setting 'steps': it has candidates, replacement"),
        ("independence", {"step": 3}, "the sampler independence has no setting 'step': it has steps, truncation.temp"),
        ("independence", {"kernel": 3}, "the sampler independence has no setting 'kernel'"),
        ("independence", {"steps": 0}, "steps is 0: set it to 1 or more"),
        ("rejection", {}, "the sampler rejection needs log_bound"),
    ],
)
def test_samplers_that_are_refused(name, settings, sentence):
    with pytest.raises(UserError) as error:
        sampler_named(name, settings)
    assert sentence in str(error.value)


def test_names_from_a_network_import_nothing():
    with pytest.raises(UserError, match=r"there is no sampler 'freenergy.samplers:Resampling'"):
        sampler_named("freenergy.samplers:Resampling", allow_import=False)
