"""Starting: the command line, the package and the loading of a residual model, beside what torch and transformers take.

    python benchmarks/bench_startup.py [--rounds 3] [--quick] [--out benchmarks/results/startup.json]

Each is a process of its own, from its start to its end. The ratio is to a bare ``import torch``; for loading a joint
model it is to the import that anybody needs who loads one with transformers.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import measuring
import numpy as np
import tokenizers
import ways

from freenergy import HuggingFaceLM, NgramFeatures, ResidualModel, SequenceSpace, Tokenizer
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.energies.ngram_tables import NgramTables

COMMAND = "from freenergy.cli import main; main()"
HELP = ("-c", COMMAND, "--help")
SHORT = {
    "import torch": ("-c", "import torch"),
    "import transformers": ("-c", "import transformers"),
    "import freenergy": ("-c", "import freenergy"),
    "freenergy --version": ("-c", COMMAND, "--version"),
    "freenergy --help": HELP,
}
MODEL_OF_TRANSFORMERS = "from transformers import AutoModelForCausalLM"
PACKAGES = 5  # of --help's imports that are named


def python(*words):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=True)


def rows_of(case, ways_, rounds, against):
    times = measuring.interleaved({name: partial(python, *words) for name, words in ways_.items()}, rounds)
    ratios = measuring.compared(times, against)
    rows = [{"case": case, "way": way, "seconds": statistics.median(times[way])} | ratios[way] for way in ways_]
    for row in rows:
        if row["way"] == "freenergy --help":
            row["at_most_seconds"] = 0.5
    return rows


def imports():
    """Where the time of ``--help`` goes: seconds of each package's own modules, the most first."""
    own = Counter()
    for line in python("-X", "importtime", *HELP).stderr.splitlines():
        if seen := re.match(r"import time:\s*(\d+) \|\s*\d+ \|\s*(\w+)", line):
            package = seen[2] if seen[2] not in sys.stdlib_module_names else "the standard library"
            own[package] += int(seen[1]) / 1e6
    return [
        {"case": "imports of freenergy --help", "way": package, "seconds": taken}
        for package, taken in own.most_common(PACKAGES)
    ]


def small_joint(folder):
    """A residual model on disk: six layers, an n-gram energy."""
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(8000)}, unk_token="w0")
    tokenizer = Tokenizer(tokenizers.Tokenizer(words), eos=0)
    lm = HuggingFaceLM(ways.made(ways.six()), eos=0)
    stream = np.append(np.arange(1, 8000).repeat(2), 0)
    energy = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=8000, eos=0, order=2))
    space = SequenceSpace(vocab_size=8000, length=ways.LENGTH)
    ResidualModel(lm, energy, tokenizer, space=space, room=ways.PREFIX).save_pretrained(folder)


def loading(rounds):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "joint"
        small_joint(path)
        found = {
            MODEL_OF_TRANSFORMERS: ("-c", MODEL_OF_TRANSFORMERS),
            "freenergy.load": ("-c", f"import freenergy; freenergy.load({str(path)!r})"),
        }
        return rows_of("loading a residual model", found, rounds, MODEL_OF_TRANSFORMERS)


def cases(quick):
    found = {"start": lambda rounds: rows_of("start", SHORT, rounds, "import torch"), "imports": lambda _: imports()}
    return found if quick else found | {"loading": loading}


def measure(rounds, quick):
    return [row for case in cases(quick).values() for row in case(rounds)]


if __name__ == "__main__":
    measuring.main(measure, "startup", cases)
