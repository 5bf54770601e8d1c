"""Small runs to break: one whose base is counted, which takes no time, and one with networks in every stage."""

import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from children import status_of
from freenergy import cli

from . import mounting

HEAD = """
name = "small"
seed = 1
[corpus]
source = "{text}"
prefix = 12
continuation = 4
validation_share = 0.2
test_share = 0.2
[tokenizer]
vocab_size = 300
"""
COUNTED = """
[base]
kind = "ngram"
order = 2
[energy]
kind = "ngram"
order = 2
lexicon = 16
"""
TRAINED = """
[base]
preset = "tiny"
block = 16
validation_tokens = 200
[base.optimisation]
steps = 12
batch_size = 2
validate_every = 4
checkpoint_seconds = 0.0
[energy]
kind = "product"
[[energy.parts]]
kind = "ngram"
order = 2
[[energy.parts]]
kind = "log-ratio"
[training]
negatives = 2
[training.optimisation]
steps = 12
batch_size = 4
validate_every = 4
checkpoint_seconds = 0.0
"""
TAIL = """
[negatives]
per_prefix = 4
windows = 24
validation_windows = 8
validation_per_prefix = 5
shard = 8
[[baselines]]
kind = "local"
name = "counts"
order = 2
windows = 10
[evaluation]
windows = 12
samples = 2
candidates = 6
certified_windows = 6
position_windows = 1
position_draws = 4
"""
PARTS = {"counted": COUNTED, "trained": TRAINED}


@pytest.fixture(scope="session")
def small_text(corpus_file, tmp_path_factory):
    """A few documents."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    rows = [json.loads(line) for line in corpus_file.read_text().splitlines()[:24]]
    path.write_text("".join(json.dumps({"text": row["text"][:1500]}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def recipes(small_text, tmp_path_factory):
    """Paths of the two recipes by name."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, part in PARTS.items():
        (folder / f"{name}.toml").write_text(HEAD.format(text=small_text) + part + TAIL)
    return {name: folder / f"{name}.toml" for name in PARTS}


@pytest.fixture(scope="session")
def whole(recipes, tmp_path_factory):
    """Finished runs that nothing disturbed, by the name of their recipe; made when they are asked for.

    Made in this process, so that all children begin with everything imported.
    """
    folder, made = tmp_path_factory.mktemp("whole"), {}

    def whole(name):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                patch.setattr(sys, "argv", ["freenergy", "run", str(recipes[name]), "--out", str(folder / name)])
                assert status_of(cli.main) == 0
            made[name] = folder / name
        return made[name]

    return whole


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of a finished run, to be damaged."""
    return lambda name: Path(shutil.copytree(whole(name), tmp_path / name))


@pytest.fixture(scope="session")
def ends_as(hashes, whole):
    """Asserts that a folder has ended as if nothing had happened."""

    def ends_as(folder, name):
        assert made(folder) == made(whole(name))
        assert shown(folder) == shown(whole(name))

    def made(folder):
        """Every file but for what baselines tell of times."""
        found = hashes(folder)
        for path in folder.glob("baselines/*/record.json"):
            found[str(path.relative_to(folder))] = json.loads(path.read_text()) | {"cpu_seconds": None}
        for record in found["baselines/stage.json"][1].values():
            record["cpu_seconds"] = None
        return found

    def shown(folder):
        """The page but for its place and times: the last column of its first table, two of the table of stages."""
        page = (folder / "report.html").read_text().replace(str(folder), "")
        first, middle, stages = re.split("(Can the estimates be believed.*Stages: cost)", page, flags=re.DOTALL)
        first = re.sub("<td>[^<]*</td></tr>", "</tr>", first)
        return first + middle + re.sub('(scope="row">[a-z]*</th>)(<td>[0-9.–]*</td>){2}', r"\1", stages)

    return ends_as


@pytest.fixture(scope="session")
def can_mount(tmp_path_factory):
    """Skips where a test may mount nothing."""
    if not mounting.can_mount(tmp_path_factory.mktemp("mount")):
        pytest.skip("file systems cannot be mounted here: that takes root")
