"""Real text, and text that is large."""

import subprocess
import sys
from itertools import pairwise

import numpy as np

from freenergy.core.progress import Silent
from freenergy.corpus import BytePairTokenizer, Corpus, CorpusSettings, count_words_and_bytes, prepare


def test_wikitext(real, tmp_path):
    folder = real("wikitext-2-raw")
    files = {"train": "valid.raw.gz", "validation": "test.raw.gz"}
    settings = CorpusSettings(train="a", validation="b", document_start="^ = [^=]", prefix=0, ending="eos")
    sources = {split: [folder / name] for split, name in files.items()}
    report = prepare(settings, BytePairTokenizer(vocab_size=2000), sources, tmp_path / "out", 0, Silent())
    corpus = Corpus.open(tmp_path / "out")
    assert 60 <= report.splits["train"].documents <= 66, "60 articles, and a few lines that look like a title"
    stream, bounds = corpus.stream("validation"), corpus.documents("validation")
    texts = [corpus.tokenizer.decode(stream[a:b].tolist()) for a, b in pairwise(bounds)]
    assert all(text.startswith(" = ") for text in texts[1:])
    assert sum(len(text.encode()) for text in texts) == report.splits["validation"].bytes
    assert 0 < report.splits["validation"].ngrams_shared < 0.05
    words, size = count_words_and_bytes(corpus.tokenizer, corpus.windows("validation").continuations(slice(None)))
    dropped = report.splits["validation"].windows_dropped
    assert size <= report.splits["validation"].bytes
    assert size > report.splits["validation"].bytes * (1 - 2 * (dropped + 1) / len(corpus.windows("validation")))
    # without a prefix a continuation that begins inside a word counts that word again
    assert words >= 0.95 * sum(len(text.split()) for text in texts)


MEASURED = """
import resource, sys
from pathlib import Path
from freenergy.corpus import BytePairTokenizer, CorpusSettings, prepare
from freenergy.core.progress import Silent
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
settings = CorpusSettings(source="x", documents="paragraph")
path, folder = map(Path, sys.argv[1:])
prepare(settings, BytePairTokenizer(vocab_size=1000, sample_megabytes=4), {"all": [path]}, folder, 0, Silent())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_text(tmp_path, make_text):
    """A gigabyte must fit in less than one; so 60 MB may not take what 400 MB would."""
    rng, words = np.random.default_rng(0), make_text(0, 200).split()
    with (tmp_path / "big.txt").open("w") as file:
        for _ in range(2800):
            file.write(" ".join(rng.choice(words, 5000)) + "\n\n")
    assert (tmp_path / "big.txt").stat().st_size > 60_000_000
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "big.txt"), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(ran.stdout) * unit < 400_000_000
