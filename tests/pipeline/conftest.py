"""A small real corpus for whole runs: the documentation of Python's own modules."""

import importlib
import json
import pydoc

import pytest

MODULES = [
    "argparse", "ast", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv",
    "datetime", "decimal", "difflib", "fractions", "functools", "gettext", "glob", "gzip", "heapq", "inspect",
    "itertools", "json", "locale", "logging", "math", "optparse", "os", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "sched", "shelve", "shlex", "shutil", "socket", "statistics", "string",
    "struct", "tarfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types", "typing",
    "uuid", "warnings", "zipfile",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """One JSON line a module."""
    path = tmp_path_factory.mktemp("text") / "python.jsonl"
    texts = [pydoc.plain(pydoc.render_doc(importlib.import_module(name))) for name in MODULES]
    path.write_text("".join(json.dumps({"text": text[:20_000]}) + "\n" for text in texts))
    return path


@pytest.fixture
def recipe(write_recipe, tmp_path):
    """A recipe whose stages take seconds."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def write_recipe(corpus_file):
    """Writes that recipe into a folder."""

    def write(folder):
        path = folder / "small.toml"
        path.write_text(RECIPE.format(corpus_file=corpus_file))
        return path

    return write


RECIPE = """
name = "small"
seed = 1
[corpus]
source = "{corpus_file}"
prefix = 12
continuation = 4
validation_share = 0.1
test_share = 0.1
[tokenizer]
vocab_size = 400
[base]
preset = "tiny"
block = 16
dropout = 0.1
validation_tokens = 500
[base.optimisation]
steps = 40
batch_size = 4
accumulate = 2
validate_every = 10
checkpoint_seconds = 0.0
[evaluation]
windows = 20
samples = 2
"""
