"""Methods of training a random field against its exact fit, on real words.

    python benchmarks/words.py WORDS.txt --seeds 0 1 2

WORDS.txt has one word of a–z per line. The model has a weight per letter 1-, 2- and 3-gram and exact sums
(``SpellingModel``), so the likelihood of every method's weights is known without error. All methods take the same
number of steps and of words per step; noise and proposals are a Kneser-Ney bigram model of the training words, or a
bigram table that learns (dnce, jsa).
"""

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from freenergy import NgramLM, Rng
from freenergy.lm.bigram_table import BigramTable
from freenergy.models.spelling import SpellingModel
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.training.loop import fit
from freenergy.training.maximum_entropy import fit_by_gradient
from freenergy.training.tasks.field import FieldMethod, FieldTask, averaged

METHODS = {
    "sml": {"method": "sml"},
    "cd, one Gibbs move": {"method": "cd"},
    "snis": {"method": "snis", "noise_ratio": 2},
    "nce": {"method": "nce", "noise_ratio": 2},
    "dnce": {"method": "dnce"},
    "augsa": {"method": "augsa"},
}


def words_of(path: Path) -> list[str]:
    """Return the words of a file that have 1 to 15 letters, in a fixed random order."""
    found = sorted({w for w in path.read_text().split() if re.fullmatch("[a-z]{1,15}", w)})
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def trained(model: SpellingModel, name: str, words: list[str], steps: int, seed: int) -> float:
    """Train by one method; return the CPU seconds that it took."""
    data, settings = model.encode(words), FieldMethod(l2=1e-4, **METHODS[name])
    stream = np.concatenate([np.array(word) for word in data.lists()[0]])
    noise = NgramLM.fit(stream, vocab_size=27, eos=0, order=2)
    learned = BigramTable(27, eos=0) if settings.method in ("dnce", "jsa") else noise
    optimisation = averaged(steps, 500, 0.05)
    task = FieldTask(
        model, data, learned, settings, optimisation, model.space, chains=500, rng=Rng(seed),
        kernel=Gibbs() if settings.method == "cd" else None,
        log_lengths=model.log_lengths if model.normaliser == "length" else None,
    )  # fmt: skip
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for _ in fit(task, optimisation, Path(folder), Rng(seed).child("steps")):
            pass
    return time.process_time() - started


def main() -> None:
    """Print one JSON line per row: nats per letter (EOS counted) on training and test words, and the exact fit's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    words = words_of(given.words)
    test, train = words[: len(words) // 10], words[len(words) // 10 :]

    def row(name: str, model: SpellingModel, seconds: float, seed: int) -> None:
        nats = {}
        for split, some in (("train", train), ("test", test)):
            x = model.encode(some)
            nats[split] = -model.log_prob(x).sum().item() / int(x.lengths.sum())
        rest = {"normaliser": model.normaliser, "seed": seed, "cpu_seconds": round(seconds, 1)}
        print(json.dumps({"row": name, **{k: round(v, 4) for k, v in nats.items()}, **rest}), flush=True)

    for normaliser in ("global", "length"):
        settings = {"order": 3, "min_count": 2, "max_length": 15, "normaliser": normaliser}
        model = SpellingModel.of_words(train, **settings)
        row("weights 0", model, 0.0, 0)
        started = time.process_time()
        fit_by_gradient(model, model.encode(train), l2=1e-4, max_steps=150)
        row("exact", model, time.process_time() - started, 0)
        for name in METHODS:
            if (name == "augsa") == (normaliser == "length"):
                for seed in given.seeds:
                    model = SpellingModel.of_words(train, **settings)
                    row(name, model, trained(model, name, train, given.steps, seed), seed)


if __name__ == "__main__":
    main()
