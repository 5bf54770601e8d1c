"""What the tests of the corpus share: small texts, a small tokenizer, files in every form."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freenergy.corpus import BytePairTokenizer, CorpusSettings, Tokenizer
from freenergy.corpus.read import find, read
from freenergy.corpus.tokenizer import learn

WORDS = ["the", "cat", "sat", "on", "a", "mat", "saw", "über", "naïve", "猫", "birds", "of", "summer", "—", "Prague"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice("   \n") for _ in range(words)).strip()


@pytest.fixture(scope="session")
def make_text() -> Callable[[int, int], str]:
    """A text of so many words, the same for the same seed."""
    return _text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer with few merges, so that characters are cut between tokens."""
    return learn(BytePairTokenizer(vocab_size=300), [_text(0, 500)])


@pytest.fixture(scope="session")
def write() -> Callable[[Path, Sequence[str], str], Path]:
    """Write documents as a file of the kind that its name says, with the text in the named column."""

    def put(path: Path, documents: Sequence[str], column: str = "text") -> Path:
        name = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
        if name.suffix == ".parquet":
            pq.write_table(pa.table({"id": range(len(documents)), column: list(documents)}), name)
            data = name.read_bytes()
            name.unlink()
        elif name.suffix == ".jsonl":
            data = "".join(json.dumps({"id": 1, column: text}) + "\n" for text in documents).encode()
        else:
            data = "\n".join(documents).encode()
        if path.suffix == ".gz":
            data = gzip.compress(data)
        if path.suffix == ".zst":
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(data)
            data = sink.getvalue().to_pybytes()
        path.write_bytes(data)
        return path

    return put


@pytest.fixture(scope="session")
def read_all() -> Callable[..., list[str]]:
    """All documents at a path, their pieces joined."""

    def documents(path: Path, **settings: object) -> list[str]:
        found: list[str] = []
        for piece in read(find(path), CorpusSettings(source="x", **settings), lambda amount: None):  # type: ignore[arg-type]
            if piece.is_first:
                found.append("")
            found[-1] += piece.text
        return found

    return documents
