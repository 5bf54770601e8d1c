"""A published number: the 5-gram Kneser-Ney perplexity of the Penn Treebank (Mikolov et al. 2011, 141.2)."""

import gzip
import math
from pathlib import Path

import numpy as np

from freenergy.core.sequences import Continuations
from freenergy.lm.ngram import NgramLM

EOS = 0


def sentences(folder: Path, split: str) -> list[list[str]]:
    with gzip.open(folder / f"ptb.{split}.txt.gz", "rt", encoding="utf-8") as file:
        return [line.split() for line in file]


def test_perplexity_is_the_published_one(real) -> None:
    train, test = (sentences(real("ptb"), split) for split in ("train", "test"))
    words = sorted({word for sentence in train for word in sentence})
    ids = {word: i for i, word in enumerate(words, 1)}
    documents = [[*(ids[word] for word in sentence), EOS] for sentence in train]
    lm = NgramLM.fit(np.concatenate(documents), vocab_size=len(words) + 1, eos=EOS, order=5)
    x = Continuations.from_lists([[]], [[[*(ids[word] for word in sentence), EOS] for sentence in test]])
    num_tokens = int(x.lengths.sum())
    assert (lm.vocab_size, num_tokens) == (10_000, 82_430)
    perplexity = math.exp(-lm.log_prob(x).sum().item() / num_tokens)
    assert abs(perplexity / 141.2 - 1) < 0.03
