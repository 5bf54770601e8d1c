"""A kernel of some twenty lines, registered, is all that the command line and the server need."""

import json
import re
from pathlib import Path

import httpx
import pytest

from freenergy.samplers.registry import KERNELS, sampler_named
from freenergy.text.write import Writing, stream

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def any_token(monkeypatch):
    """The kernel that CONTRIBUTING.md shows, under its name; the page checks its law by enumeration."""
    monkeypatch.setattr(KERNELS, "_classes", dict(KERNELS._classes))
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "AnyToken" in block
    )
    kernel = code[code.index("class AnyTokenState") : code.index("\nworld = ")]
    assert len([line for line in kernel.splitlines() if line.strip()]) <= 28
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert "any-token" in KERNELS


@pytest.mark.usefixtures("any_token")
def test_it_runs_from_the_command_line(call, joint_run):
    how = ("--prefix", "The", "--sampler", "any-token", "--set", "steps=40", "--num", 3)
    status, out, err = call("sample", joint_run[0], *how, "--json")
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    (step,) = result["steps"]
    assert len(result["texts"]) == 3
    assert (step["method"], step["distance"], step["law"]) == ("anytoken", None, "model")
    assert 0 < step["acceptance"] < 1
    status, out, err = call("sample", joint_run[0], *how)
    assert status == 0, err
    assert re.search(r"total variation from the residual model .* not known; \d+ base tokens", " ".join(out.split()))
    status, _, err = call("sample", joint_run[0], "--sampler", "any-token", "--set", "stride=3")
    assert (status, "the sampler any-token has no setting 'stride': it has steps" in err) == (2, True)


@pytest.mark.usefixtures("any_token")
def test_it_is_served(server, joint):
    listed = {one["id"]: one["settings"] for one in httpx.get(f"{server}/v1/samplers").json()["data"]}
    assert listed["any-token"] == ["steps"]
    body = {"model": "tiny", "prompt": "a bad", "seed": 3, "max_tokens": 6, "sampler": "any-token"}
    found = httpx.post(f"{server}/v1/completions", json=body | {"settings": {"steps": 9}}, timeout=30).json()
    writing = Writing(sampler=sampler_named("any-token", {"steps": 9}), max_context=joint.max_context)
    assert found["choices"][0]["text"] == joint.write("a bad", joint.space, stream(3), writing)[0].text
