"""A world of eight words whose scores can be worked out, and lists of candidates in it."""

import json

import numpy as np
import pytest
import tokenizers

from freenergy import ResidualModel, Rng, TabularLM, Tokenizer

WORDS = 8  # w0 … w7; w0 is what an unknown word reads as, EOS is another


def small_world():
    """Order 1, so that a list is scored in a moment; the energy dislikes w1."""
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<end>": WORDS}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    lm = TabularLM.random(Rng(2), vocab_size=WORDS + 1, order=1, eos=WORDS)
    return ResidualModel(lm, energy, Tokenizer(inner, eos=WORDS))


@pytest.fixture
def joint():
    return small_world()


def energy(x):
    return 2.0 * ((x.tokens == 1) & x.mask).double().sum(-1) - 0.3 * x.lengths


@pytest.fixture
def write(tmp_path):
    """Write objects (or lines as they are) to a file of the given name."""

    def put(name, rows):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return put


@pytest.fixture
def some_lists():
    """Lists of two to six texts with a reference and two other scores, one of which knows something."""

    def make(count, seed=0, **more):
        rng, rows = np.random.default_rng(seed), []
        for number in range(count):
            texts = [" ".join(f"w{i}" for i in rng.integers(0, WORDS, 4)) for _ in range(rng.integers(2, 7))]
            right = texts[rng.integers(len(texts))]
            wrong = [sum(a != b for a, b in zip(text.split(), right.split(), strict=True)) for text in texts]
            scores = {
                "ear": (-0.8 * np.array(wrong) + rng.normal(size=len(texts))).tolist(),
                "dice": [0.5] * len(texts),
            }
            row = {"prefix": f"w{rng.integers(WORDS)}", "candidates": texts, "scores": scores, "reference": right}
            rows.append(row | {"id": number} | more)
        return rows

    return make
