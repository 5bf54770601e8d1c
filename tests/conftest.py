"""What all tests share: no network, reproducible examples, one budget for statistical tests, small real runs."""

import ast
import hashlib
import importlib
import json
import os
import shutil
import sys
import time
from itertools import count
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["FREENERGY_WORKERS"] = "local:1"  # tests that are about workers start their own

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


STARTED = time.monotonic()


def pytest_sessionfinish(session):
    """Fail a lane that has become slower than its budget (``make test-laws``)."""
    seconds, budget = time.monotonic() - STARTED, float(os.environ.get("FREENERGY_TEST_SECONDS", "inf"))
    if seconds > budget and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nthese tests took {seconds:.0f} seconds, more than {budget:.0f}: move slow ones to tests/runs")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


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


# a small real corpus for whole runs: the documentation of Python's own modules
MODULES = [
    "argparse", "ast", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv",
    "datetime", "decimal", "difflib", "fractions", "functools", "gettext", "glob", "gzip", "heapq", "inspect",
    "json", "locale", "logging", "optparse", "os", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "sched", "shelve", "shlex", "shutil", "socket", "statistics", "string",
    "struct", "tarfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types", "typing",
    "uuid", "warnings", "zipfile",
]  # fmt: skip


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory):
    """A folder that all workers of one test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def corpus_file(shared_tmp):
    """One JSON line per module."""
    path = shared_tmp / "python.jsonl"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            rows = [json.dumps({"text": _documentation(name)[:20_000]}) for name in MODULES]
            path.write_text("\n".join(rows) + "\n")
    return path


def _documentation(name):
    """The docstrings in a module's source: the same on every machine, where pydoc would also show its environment."""
    tree = ast.parse(Path(importlib.import_module(name).__file__).read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(dict.fromkeys(text for node in nodes if (text := ast.get_docstring(node))))


@pytest.fixture
def recipe(write_recipe, tmp_path):
    """A recipe whose stages take seconds."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def write_recipe(corpus_file):
    """Writes that recipe into a folder; ``more`` is TOML or the choices of ``tiny_run``."""
    from freenergy.testing.runs import tiny_run

    def write(folder, more="", **choices):
        path = folder / "small.toml"
        path.write_text(tiny_run(corpus_file, **choices) + more)
        return path

    return write


@pytest.fixture(scope="session")
def hashes():
    """What is in a run's folder, to compare two of them."""
    from freenergy.core.files import file_hash

    def hashes(folder):
        """Every file that a run makes, except records of times and places."""
        skipped = {"metrics.jsonl", ".lock", "report.html"}  # the page tells what each stage has cost
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skipped]
        found = {}
        for path in files:
            name = str(path.relative_to(folder))
            if path.name == "stage.json":
                record = json.loads(path.read_text())
                for times in ("seconds_of_steps", "cpu_seconds"):
                    record["summary"].pop(times, None)
                found[name] = [record["key"], record["summary"]]
            else:
                found[name] = file_hash(path)
        return found

    return hashes


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """Calls a function in a child process that begins with everything imported; see tests/helpers/children.py."""
    import children

    logs, numbers = tmp_path_factory.mktemp("logs"), count()
    return lambda act: children.fork(act, logs / str(next(numbers)))


@pytest.fixture(scope="session")
def begin(tmp_path_factory):
    """Starts ``freenergy ARGUMENTS`` in such a child."""
    import children

    logs, numbers = tmp_path_factory.mktemp("logs"), count()
    return lambda *arguments, before=None: children.start(arguments, logs / str(next(numbers)), before)


@pytest.fixture(scope="session")
def finished_run(shared_tmp, tmp_path_factory):
    """Makes a run once for all workers, keyed by its recipe; every caller gets a copy of its own.

    Returns the folder, the path of the recipe and the results of the stages.
    """
    from freenergy import load_recipe, run

    def finished_run(text, changes=(), *, stage=None):
        key = hashlib.sha256(repr((text, changes, stage)).encode()).hexdigest()[:16]
        shared, own = shared_tmp / "finished" / key, tmp_path_factory.mktemp("finished")
        shared.mkdir(parents=True, exist_ok=True)
        with FileLock(shared.with_suffix(".lock")):
            (shared / "small.toml").write_text(text)
            list(run(load_recipe(str(shared / "small.toml"), changes), shared / "run", stage=stage))
            shutil.copytree(shared, own, dirs_exist_ok=True)
        path = own / "small.toml"
        return own / "run", path, list(run(load_recipe(str(path), changes), own / "run", stage=stage))

    return finished_run


@pytest.fixture(scope="session")
def joint_run(finished_run, corpus_file):
    """A finished run with a counted base, whose stages take no time, and an energy of n-gram features; its recipe."""
    from freenergy.testing.runs import tiny_run

    return finished_run(tiny_run(corpus_file, base="counts", energy="ngram", with_baseline=True))[:2]


@pytest.fixture(scope="session")
def story_model(real):
    """A trained model of 260 thousand weights, and its 512 tokens as text."""
    import llama2c
    from freenergy import HuggingFaceLM

    folder = real("stories260K")
    lm = HuggingFaceLM(llama2c.load(folder / "stories260K.bin"), eos=1)
    return lm, llama2c.vocabulary(folder / "tok512.bin", 512)


@pytest.fixture(scope="session")
def stories(story_model):
    """That model, and "Once upon a time" in its tokens."""
    from freenergy import Sequences

    lm, pieces = story_model
    once = [1, *(pieces.index(piece) for piece in (" Once", " upon", " a", " time"))]
    return lm, Sequences.from_lists([once])
