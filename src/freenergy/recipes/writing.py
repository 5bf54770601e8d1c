"""Writing with a run: many prefixes, one at a time, each from the seed and its own number."""

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
from freenergy.models.residual import no_energy
from freenergy.recipes.load import load_run
from freenergy.recipes.open_run import load, load_base
from freenergy.text.model import RECORD, ResidualModel
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
class Task:
    """One prefix, or a file of them, to be continued."""

    joint: ResidualModel
    folder: Path
    prefixes: str | Path  # a text, or a file
    count: int
    space: SequenceSpace
    seed: int
    writing: Writing

    @classmethod
    def of(
        cls, joint: ResidualModel, folder: Path, prefixes: str | Path, length: int | None, seed: int, writing: Writing
    ) -> "Task":
        """Check everything that can be checked before the first text is written."""
        Rng(seed)
        known = joint.space_of(_LENGTH if joint.space is None and length is None else length)
        count = 1 if isinstance(prefixes, str) else _checked(joint, prefixes, known.length, writing)
        return cls(joint, folder, prefixes, count, known, seed, writing)

    def results(
        self, progress: Progress, *, skip: int = 0, on_chunk: OnChunk | None = None
    ) -> Iterator[Texts | Failed]:
        """Texts of each prefix from number ``skip`` on; prefix i draws from its own stream."""
        texts = iter([self.prefixes]) if isinstance(self.prefixes, str) else read_prefixes(self.prefixes)
        for i, prefix in islice(enumerate(texts), skip, None):
            rng = stream(self.seed, i)
            try:
                yield self.joint.write(prefix, self.space, rng, self.writing, progress=progress, on_chunk=on_chunk)
            except UserError as error:
                if isinstance(self.prefixes, str):
                    raise
                yield Failed(prefix, str(error))

    def key(self) -> dict[str, Any]:
        """All that decides the texts, so that a file that was begun under the same goes on."""
        lines = self.prefixes if isinstance(self.prefixes, str) else file_hash(self.prefixes)
        how = {"seed": self.seed, "space": repr(self.space), "writing": repr(self.writing)}
        return {"prefixes": lines, "model": _mark(self.folder), **how}


def open_writer(folder: str | Path) -> ResidualModel:
    """The joint model of a run or of a saved folder; a run without an energy gives its base with E = 0."""
    if (Path(folder) / RECORD).is_file() or load_run(folder).recipe.energy is not None:
        return load(folder)
    lm, tokenizer = load_base(folder)
    return ResidualModel(lm, no_energy, tokenizer)


def has_energy(joint: ResidualModel) -> bool:
    """Whether it is more than its base."""
    return joint.energy is not no_energy


def _mark(folder: Path) -> Any:
    """What names the model: the keys of the stages that made it, or its files."""
    if (folder / RECORD).is_file():
        return [file_hash(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    run = load_run(folder)
    return [run.finished(name)["key"] for name in ("base", "energy") if name == "base" or run.recipe.energy is not None]


def read_prefixes(path: Path) -> Iterator[str]:
    """One prefix a line: as it stands in a text file, where it may be empty, or under ``prefix`` in a .jsonl file."""
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


def _checked(joint: ResidualModel, path: Path, length: int, writing: Writing) -> int:
    """Read all prefixes once, so that a bad one is found before anything is written; how many there are."""
    count = 0
    assert joint.tokenizer is not None, "a run has a tokenizer"
    for count, prefix in enumerate(read_prefixes(path), 1):
        tokens = Sequences.from_lists([joint.tokenizer.encode(prefix)])
        try:
            if writing.chunks == 1:
                check_fits(tokens, length, joint.base.max_length)
        except UserError as error:
            raise UserError(f"{path}, line {count}: {error}") from None
    if not count:
        raise UserError(f"{path} has no prefixes: write one a line")
    return count
