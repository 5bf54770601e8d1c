"""Texts for many prefixes, one at a time, each from the seed and its own number."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, parse_json_text
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.lm.stepping import check_fits
from freenergy.text.model import ResidualModel
from freenergy.text.texts import Texts
from freenergy.text.write import OnChunk, Writing, stream

_LENGTH = 40  # tokens, where nothing says how many


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """A prefix of a file that could not be continued, and why."""

    prefix: str
    error: str


@final
@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One prefix, or a file of them, to be continued."""

    model: ResidualModel
    prefixes: str | Path  # a text, or a file
    count: int
    space: SequenceSpace
    seed: int
    writing: Writing

    @classmethod
    def of(
        cls, model: ResidualModel, prefixes: str | Path, length: int | None, seed: int, writing: Writing
    ) -> "GenerationTask":
        """Check everything that can be checked before the first text is written."""
        Rng(seed)
        known = model.space_of(_LENGTH if model.space is None and length is None else length)
        count = 1 if isinstance(prefixes, str) else _checked(model, prefixes, known.length, writing)
        return cls(model, prefixes, count, known, seed, writing)

    def results(
        self, progress: Progress, *, skip: int = 0, on_chunk: OnChunk | None = None
    ) -> Iterator[Texts | Failed]:
        """Texts of each prefix from number ``skip`` on; prefix i draws from its own stream."""
        texts = iter([self.prefixes]) if isinstance(self.prefixes, str) else read_prefixes(self.prefixes)
        for i, prefix in islice(enumerate(texts), skip, None):
            rng = stream(self.seed, i)
            try:
                yield self.model.write(prefix, self.space, rng, self.writing, progress=progress, on_chunk=on_chunk)
            except UserError as error:
                if isinstance(self.prefixes, str):
                    raise
                yield Failed(prefix, str(error))

    def key(self, model: Any) -> dict[str, Any]:
        """Return all that decides the texts, ``model`` naming the model: a file begun under the same key is resumed."""
        lines = self.prefixes if isinstance(self.prefixes, str) else file_hash(self.prefixes)
        how = {"seed": self.seed, "space": repr(self.space), "writing": repr(self.writing)}
        return {"prefixes": lines, "model": model, **how}


def read_prefixes(path: Path) -> Iterator[str]:
    """Read one prefix per line: the line of a text file, which may be empty, or ``prefix`` in a .jsonl file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if path.suffix != ".jsonl":
                    yield line.rstrip("\n")
                elif not line.isspace():
                    yield _prefix_of(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a .txt or .jsonl file of prefixes") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8: give the prefixes in that encoding") from None


def _prefix_of(line: str, where: str) -> str:
    row = parse_json_text(line, where)
    if not isinstance(row, dict) or not isinstance(row.get("prefix"), str):
        raise UserError(f'{where} has no text under prefix: write lines such as {{"prefix": "Once upon a time"}}')
    return str(row["prefix"])


def _checked(model: ResidualModel, path: Path, length: int, writing: Writing) -> int:
    """Read all prefixes once, so that a bad one is found before anything is written; how many there are."""
    count = 0
    assert model.tokenizer is not None, "a run has a tokenizer"
    for count, prefix in enumerate(read_prefixes(path), 1):
        tokens = Sequences.from_lists([model.tokenizer.encode(prefix)])
        try:
            if writing.chunks == 1:
                check_fits(tokens, length, model.base.max_length)
        except UserError as error:
            raise UserError(f"{path}, line {count}: {error}") from None
    if not count:
        raise UserError(f"{path} has no prefixes: write one per line")
    return count
