"""Makes a small finished run with the freenergy that is installed, to be read by all later ones.

    git worktree add ../old COMMIT;  PYTHONPATH=../old/src python make.py COMMIT

Writes COMMIT.tar.xz next to this file: the text, the recipe, and the run with an evaluation of its own. The text is
made of a few words by a fixed rule, so that the archive is small.
"""

import json
import lzma
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RECIPE = """
name = "old"
seed = 1
[corpus]
source = "few.jsonl"
prefix = 8
continuation = 4
validation_share = 0.2
test_share = 0.2
[tokenizer]
vocab_size = 270
[base]
kind = "ngram"
order = 2
[energy]
kind = "ngram"
order = 2
lexicon = 4
[negatives]
per_prefix = 3
windows = 16
validation_windows = 6
validation_per_prefix = 3
shard = 8
[evaluation]
windows = 6
samples = 1
candidates = 4
certified_windows = 3
position_windows = 1
position_draws = 2
"""
WORDS = [
    "the",
    "river",
    "goes",
    "down",
    "to",
    "a",
    "sea",
    "and",
    "we",
    "see",
    "it",
    "from",
    "an",
    "old",
    "house",
    "on",
    "the",
    "hill",
]
COMMANDS = [
    ["run", "recipe.toml", "--out", "run", "--json"],
    ["evaluate", "run", "--windows", "2", "--candidates", "3", "--json"],
]


def text(seed=1, documents=20):
    chance = random.Random(seed)
    rows = [
        " ".join(chance.choices(" ".join(WORDS).split(), k=chance.randrange(20, 60))) + "." for _ in range(documents)
    ]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


def make(name):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "few.jsonl").write_text(text())
        os.utime(Path(folder, "few.jsonl"), (10**9, 10**9))  # a part of the corpus's key, and exact in an archive
        Path(folder, "recipe.toml").write_text(RECIPE)
        answers = []
        for command in COMMANDS:
            call = [sys.executable, "-c", "from freenergy.cli import main; main()", *command]
            own = os.environ | {"FREENERGY_WORKERS": "local:1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(call, cwd=folder, env=own, check=True, capture_output=True, text=True)
            answers.append(json.loads(done.stdout))
        Path(folder, "answers.json").write_text(json.dumps(answers))
        out = Path(__file__).with_name(f"{name}.tar.xz")
        with lzma.open(out, "wb", preset=9) as file, tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and path.suffix not in (".html", ".svg", ".png") and path.name != ".lock":
                    archive.add(path, path.relative_to(folder))
        print(out, out.stat().st_size)


if __name__ == "__main__":
    make(sys.argv[1])
