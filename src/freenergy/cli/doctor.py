"""``freenergy doctor``: reports the installation and runs a few exact self-tests in seconds."""

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freenergy.core.files import write_text
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.corpus.resources import cache_folder
from freenergy.lm.tabular import TabularLM
from freenergy.testing import law

_PACKAGES = ("freenergy", "torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors", "accelerate")
_EXTRAS = ("datasets", "matplotlib", "jinja2", "fastapi", "uvicorn")


def examine() -> dict[str, Any]:
    """Return the machine, and the outcome of every check."""
    checks = [_check(*check) for check in _CHECKS]
    return {"machine": _machine(), "checks": checks}


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    machine |= {name: _version(name) for name in _PACKAGES}
    machine |= {f"{name} (extra)": "installed" if importlib.util.find_spec(name) else "missing" for name in _EXTRAS}
    machine |= {"cores": os.cpu_count(), "torch threads": torch.get_num_threads()}
    machine["devices"] = ", ".join(["cpu", *_accelerators()])
    machine["cache"] = str(cache_folder())
    return machine


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _accelerators() -> list[str]:
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _check(name: str, test: Callable[[], tuple[bool, str]]) -> dict[str, Any]:
    try:
        ok, detail = test()
    except Exception as error:  # report whatever is broken
        ok, detail = False, f"{type(error).__name__}: {error}"
    return {"name": name, "ok": ok, "detail": detail}


def _exact_law() -> tuple[bool, str]:
    lm = TabularLM.random(Rng(0), vocab_size=3, order=2)
    space, contexts = SequenceSpace(vocab_size=3, length=3, eos=0), Sequences.from_lists([[1]])
    found = law(lambda rng: lm.sample(contexts, 1, space, rng), lambda draws: tuple(draws.x.lists()[0][0]))
    strings = space.enumerate()
    truth = lm.log_prob(Continuations(contexts, strings.tokens[None], strings.lengths[None]))[0].exp()
    worst = max(abs(found[tuple(x)] - p) for x, p in zip(strings.lists(), truth.tolist(), strict=True))
    return worst < 1e-12, f"{len(strings)} strings, largest difference {worst:.0e}"


def _shared_prefix(*, fused: bool) -> tuple[bool, str]:
    from freenergy.lm.huggingface import HuggingFaceLM
    from freenergy.lm.presets import build, preset

    model = build(preset("tiny").config(vocab_size=64, eos=0), Rng(0))
    lm = HuggingFaceLM(model, eos=0, fused=fused)
    contexts = Sequences.from_lists([[1, 2, 3], [4, 5]])
    draws = lm.sample(contexts, 70, SequenceSpace(vocab_size=64, length=8), Rng(0))
    lm.shares_prefix = False
    worst = float((draws.log_base - lm.log_prob(draws.x)).abs().max())
    wanted = "compiled steps" if fused else "own steps"
    if lm.decodes_by != wanted:
        return fused, f"{lm.decodes_by} instead" + ": no C++ compiler was found" * fused
    return worst < 1e-4, f"largest difference from a plain forward pass {worst:.0e} nats"


def _speed() -> tuple[bool, str]:
    a = torch.randn(1024, 1024)
    a @ a
    started, count = time.monotonic(), 0
    while time.monotonic() - started < 1:
        a @ a
        count += 1
    return True, f"{2e-9 * 1024**3 * count / (time.monotonic() - started):.0f} GFLOP/s in float32 matrix products"


def _files() -> tuple[bool, str]:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        write_text(Path(place) / "probe", "whole")
    return True, f"{folder} can be written"


_CHECKS: tuple[tuple[str, Callable[[], tuple[bool, str]]], ...] = (
    ("sampling law equals the model's", _exact_law),
    ("one copy of the prefix, same numbers", partial(_shared_prefix, fused=False)),
    ("the same by compiled steps", partial(_shared_prefix, fused=True)),
    ("matrix products", _speed),
    ("cache folder", _files),
)
