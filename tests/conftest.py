"""What all tests share: no network, reproducible examples, one budget for statistical tests."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["FREENERGY_ENGINE"] = "local:1"  # tests that are about workers start their own

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny tensors gain nothing from threads, and workers in parallel would fight for the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tests never touch the user's cache unless they ask for it."""
    monkeypatch.setenv("FREENERGY_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def real():
    """Folders of real corpora and models that stand beside the checkout on some machines."""

    def folder(name):
        if not (SHARED_DATA / name).is_dir():
            pytest.skip(f"no {name} beside the checkout (../shared/data)")
        return SHARED_DATA / name

    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process: status, stdout, stderr."""
    from freenergy import cli  # here, since the checks of shapes are switched on after this file is read

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["freenergy", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return call
