"""Labelled text in and out: tables in CoNLL's manner, Universal Dependencies, JSON-lines.

    .conllu          ten columns, comments, ranges (3-4) and empty nodes (3.1), which are kept and have no tag
    .jsonl           {"words": ["The", "sea"], "tags": ["DET", "NOUN"]}; columns and other keys are kept
    anything else    a word per line, columns apart by tabs or blanks, a blank line between sentences

Each may end in .gz. Sentences are written as they were read: a table gets the tags as one more column, a file of
Universal Dependencies in the column of its part of speech, a JSON object under "tags".
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, parse_json_line
from freenergy.tagging.sentences import Sentence

Format = Literal["auto", "conll", "conllu", "jsonl"]
UPOS, XPOS = 3, 4  # columns of CoNLL-U
_FORM, _WIDTH, _DOCUMENT = 1, 10, "-DOCSTART-"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column has what; counted from 0, from the end where negative. JSON has names instead."""

    word: int = 0
    tag: int | None = -1  # None: the text has no tags
    columns: tuple[int, ...] = ()


_DEFAULT = Columns()


def format_of(path: Path, given: Format = "auto") -> str:
    """Returns the format of a file.

    >>> format_of(Path("en-ud-dev.conllu.gz")), format_of(Path("train.txt"))
    ('conllu', 'conll')
    """
    name = path.with_suffix("") if path.suffix == ".gz" else path
    known = {".conllu": "conllu", ".jsonl": "jsonl"}
    return known.get(name.suffix, "conll") if given == "auto" else given


def read_sentences(path: str | Path, format: Format = "auto", columns: Columns = _DEFAULT) -> list[Sentence]:
    """Returns the sentences of a file."""
    path = Path(path)
    lines = _lines(path)
    kind = format_of(path, format)
    if kind == "jsonl":
        found = [_of_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    else:
        make = _of_conllu if kind == "conllu" else _of_table
        found = [one for block in _blocks(lines) if (one := make(block, columns, path)) is not None]
    if not found:
        raise UserError(f"{path} has no sentences: check the file and its format")
    return found


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"there is no file {path}: check the path")
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, OSError) as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): convert it") from None
    return text.replace("\r\n", "\n").split("\n")


def _blocks(lines: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Yields the numbered lines of each sentence; a line of blanks alone separates two."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []


def _of_table(block: Sequence[tuple[int, str]], columns: Columns, path: Path) -> Sentence | None:
    rows = [tuple(line.rstrip("\r").split("\t") if "\t" in line else line.split()) for _, line in block]
    if rows[0][0] == _DOCUMENT:
        return None
    wanted = [columns.word, *columns.columns, *([] if columns.tag is None else [columns.tag])]
    for (number, line), row in zip(block, rows, strict=True):
        for column in wanted:
            if not -len(row) <= column < len(row):
                raise UserError(
                    f"{path}, line {number} has {len(row)} columns, so none with the number {column} ({line[:40]!r}): "
                    "fix the line, or the columns under data"
                )
        if columns.tag is not None and columns.word % len(row) == columns.tag % len(row):
            raise UserError(f"{path}, line {number} has no column for a tag ({line[:40]!r}): fix the line")
    return Sentence(
        words=tuple(row[columns.word] for row in rows),
        tags=() if columns.tag is None else tuple(row[columns.tag] for row in rows),
        columns=tuple(tuple(row[column] for column in columns.columns) for row in rows) if columns.columns else (),
        rows=tuple(rows),
        places=tuple(range(len(rows))),
    )


def _of_conllu(block: Sequence[tuple[int, str]], columns: Columns, path: Path) -> Sentence | None:
    rows = [(line,) if line.startswith("#") else tuple(line.split("\t")) for _, line in block]
    for (number, _), row in zip(block, rows, strict=True):
        if len(row) not in (1, _WIDTH) or (len(row) == 1 and not row[0].startswith("#")):
            raise UserError(f"{path}, line {number} has {len(row)} columns: CoNLL-U has {_WIDTH}, apart by tabs")
    places = [i for i, row in enumerate(rows) if len(row) == _WIDTH and row[0].isdigit()]
    if not places:
        return None
    tag = columns.tag if columns.tag in (UPOS, XPOS) else UPOS
    more = columns.columns
    return Sentence(
        words=tuple(rows[i][_FORM] for i in places),
        tags=() if columns.tag is None else tuple(rows[i][tag] for i in places),
        columns=tuple(tuple(rows[i][column] for column in more) for i in places) if more else (),
        rows=tuple(rows),
        places=tuple(places),
    )


def _of_json(line: str, where: str) -> Sentence:
    value = parse_json_line(line, where)
    if not isinstance(value, dict) or not _are_texts(value.get("words")):
        raise UserError(f'{where} has no "words", a list of texts: fix the line')
    tags = value.get("tags") or []
    if not isinstance(tags, list):
        raise UserError(f'{where}: "tags" is not a list: fix the line')
    given = value.get("columns") or []
    if not isinstance(given, list) or not all(_are_texts(each) for each in given):
        raise UserError(f'{where}: "columns" is not a list of lists of texts, one for each word: fix the line')
    more = {key: each for key, each in value.items() if key not in ("words", "tags", "columns")}
    labels = tuple(_label(tag, where) for tag in tags)
    return Sentence(tuple(value["words"]), labels, tuple(tuple(each) for each in given), more=more)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _label(tag: Any, where: str) -> str:
    """Returns a tag as text: null is unknown, a list means one of these."""
    if tag is None:
        return "_"
    if isinstance(tag, str):
        return tag
    if _are_texts(tag) and tag:
        return "|".join(tag)
    raise UserError(f"{where}: the tag {str(tag)[:40]} is neither a text, nor null, nor a list of texts: fix the line")


def to_lines(sentence: Sentence, tags: Sequence[str], format: str, column: int | None = None) -> list[str]:
    """Returns a sentence with these tags as lines of a format, without the blank line after it."""
    if format == "jsonl":
        columns = {"columns": [list(each) for each in sentence.columns]} if sentence.columns else {}
        value = {"words": list(sentence.words), "tags": list(tags), **columns, **sentence.more}
        return [json.dumps(value, ensure_ascii=False)]
    rows = [list(row) for row in sentence.rows or _fresh_rows(sentence, format)]
    places = sentence.places or range(len(rows))
    for place, tag in zip(places, tags, strict=True):
        if format == "conllu":
            rows[place][column if column in (UPOS, XPOS) else UPOS] = tag
        else:
            rows[place].append(tag)
    between = "\t" if format == "conllu" or any(" " in cell for row in rows for cell in row) else " "
    return [between.join(row) for row in rows]


def _fresh_rows(sentence: Sentence, format: str) -> list[tuple[str, ...]]:
    """Returns the rows of a sentence that came from JSON or from a program."""
    if format == "conllu":
        return [(str(i), word, *["_"] * (_WIDTH - 2)) for i, word in enumerate(sentence.words, 1)]
    columns = sentence.columns or ((),) * len(sentence)
    return [(word, *each) for word, each in zip(sentence.words, columns, strict=True)]


def write_sentences(
    path: str | Path, sentences: Iterable[Sentence], tags: Iterable[Sequence[str]], format: Format = "auto",
    column: int | None = None,
) -> None:  # fmt: skip
    """Write sentences with these tags; the file appears whole."""
    kind = format_of(Path(path), format)
    end = "\n" if kind == "jsonl" else "\n\n"
    blocks = ["\n".join(to_lines(one, own, kind, column)) + end for one, own in zip(sentences, tags, strict=True)]
    data = "".join(blocks).encode()
    with atomic_write(Path(path)) as aside:
        aside.write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
