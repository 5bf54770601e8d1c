"""Lists of candidates on disk: one JSON object per line (docs/ranking.md).

    {"prefix": "…", "candidates": ["…", …], "scores": {"acoustic": [s_1, …]}, "reference": "…", "id": …, "document": …}
    error rate = Σ errors of the chosen / Σ words of the references,      or / number of lists with ``errors``

Only ``candidates`` has to be there. How wrong a candidate is comes from ``reference`` (words to change, put in or leave
out) or stands there as ``errors``, one number per candidate. Nothing is held but the line at hand.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import parse_json_text

OWN = ("base", "energy", "length")  # names of weights that no other score may have
_KEYS = ("prefix", "candidates", "scores", "reference", "errors", "id", "document")
_SHAPE = 'write {"prefix": "…", "candidates": ["…", …]}'


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NBest:
    """One list."""

    line: int
    candidates: tuple[str, ...]
    prefix: str = ""
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    reference: str | None = None
    given: tuple[float, ...] | None = None  # "errors" in the file
    name: Any = None  # "id" in the file
    document: Any = None

    @property
    def unit(self) -> str | None:
        """What errors are counted by, where there is something to count them by."""
        return "list" if self.given is not None else "word" if self.reference is not None else None

    @property
    def units(self) -> int:
        """How many of them: the words of the reference, or one list."""
        return 1 if self.reference is None else len(self.reference.split())

    def errors(self) -> tuple[float, ...]:
        """How wrong each candidate is."""
        if self.reference is None:
            assert self.given is not None
            return self.given
        words = self.reference.split()
        distance = {text: float(edit_distance(words, text.split())) for text in set(self.candidates)}
        return tuple(distance[text] for text in self.candidates)


def read_lists(path: Path) -> Iterator[NBest]:
    """The lists of a file, one by one; a bad line is one sentence with its number."""
    first: NBest | None = None
    measured: NBest | None = None
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}, line {number}"
                text = _text(raw, where)
                if not text.strip():
                    continue
                found = _parsed(text, number, where)
                first = first or found
                measured = measured or (found if found.unit else None)
                _check_alike(found, first, measured, where)
                yield found
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file of JSON lines") from None
    if first is None:
        raise UserError(f"there is no list in {path}: {_SHAPE}, one a line")


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The fewest words to change, put in or leave out on the way from a to b.

    >>> edit_distance("the cat sat".split(), "a cat sat down".split())
    2
    """
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 at byte {error.start} of the line: convert the file") from None


def _parsed(text: str, number: int, where: str) -> NBest:
    value = parse_json_text(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where} is no JSON object: {_SHAPE}")
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise UserError(f"{where} has the unknown key {unknown[0]!r}: use {', '.join(_KEYS)} (id may hold anything)")
    candidates = _candidates(value.get("candidates"), where)
    prefix = value.get("prefix", "")
    if not isinstance(prefix, str):
        raise UserError(f"{where} has a prefix that is no text: {_SHAPE}, with an empty prefix to begin a document")
    given, reference = value.get("errors"), value.get("reference")
    if given is not None and reference is not None:
        raise UserError(f"{where} has errors and a reference: leave one of them out")
    if reference is not None and not isinstance(reference, str):
        raise UserError(f"{where} has a reference that is no text: give the right text, or errors instead")
    errors = None if given is None else _numbers(given, len(candidates), "errors", where)
    if errors and min(errors) < 0:
        raise UserError(f"{where} has {min(errors):g} errors: give numbers of 0 or more, low = good")
    return NBest(
        line=number,
        prefix=prefix,
        candidates=candidates,
        scores=_scores(value.get("scores", {}), len(candidates), where),
        reference=reference,
        given=errors,
        name=_label(value.get("id"), "id", where),
        document=_label(value.get("document"), "document", where),
    )


def _label(value: Any, what: str, where: str) -> Any:
    """Anything that JSON can say again: it is printed with the result."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise UserError(
            f"{where} has a number in {what} that is not finite, which JSON cannot represent: replace it"
        ) from None
    return value


def _candidates(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where} has no list of texts as candidates: {_SHAPE}")
    if "" in value:
        raise UserError(
            f"{where}: candidate {value.index('') + 1} is empty, which compares with nothing: give it some text or "
            "leave it out"
        )
    return tuple(value)


def _scores(value: Any, count: int, where: str) -> dict[str, tuple[float, ...]]:
    if not isinstance(value, dict):
        raise UserError(f'{where} has scores that are no object: write "scores": {{"name": [one number a candidate]}}')
    for name in value:
        if name in OWN:
            raise UserError(
                f"{where} calls a score {name!r}, as one of the model's own is called: give it another name"
            )
    return {name: _numbers(numbers, count, f"the score {name!r}", where) for name, numbers in sorted(value.items())}


def _numbers(value: Any, count: int, what: str, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        found = f"{len(value)} numbers" if isinstance(value, list) else "no list"
        raise UserError(f"{where} has {found} as {what} of {count} candidates: give one number a candidate")
    try:
        if all(type(number) in (int, float) and math.isfinite(number) for number in value):
            return tuple(map(float, value))
    except OverflowError:  # an integer beyond every float
        pass
    raise UserError(f"{where} has something else than finite numbers in {what}: give one number a candidate")


def _check_alike(found: NBest, first: NBest, measured: NBest | None, where: str) -> None:
    """Every list has the scores of the first one, and what is wrong is counted in one way."""
    if found.scores.keys() != first.scores.keys():
        mine, theirs = (", ".join(one.scores) or "none" for one in (found, first))
        raise UserError(f"{where} has the scores {mine}, but line {first.line} has {theirs}: give all lists the same")
    if measured is not None and found.unit not in (None, measured.unit):
        mine, theirs = ("errors" if one.unit == "list" else "a reference" for one in (found, measured))
        raise UserError(f"{where} has {mine}, but line {measured.line} has {theirs}: give all lists the same")
