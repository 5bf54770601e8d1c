"""A file of lists through a residual model, line by line, kept on disk as it goes.

    FILE.jsonl  →  FOLDER/<fingerprint>.jsonl: a line a list, with the ranking of its candidates

Lists are scored one at a time, so a list's numbers do not depend on its neighbours and nothing is held but the list at
hand. A killed scoring resumes after its last complete line and ends with the same bits. The fingerprint names the file
and settings and, by its scores of the first list, the model: what another one has scored is not taken for ours.
"""

import json
import math
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, fingerprint, resumable_jsonl
from freenergy.core.progress import Progress
from freenergy.text.model import ResidualModel
from freenergy.text.nbest.nbest import NBest, read_lists
from freenergy.text.ranking import Ranked, Ranking

Scored = Iterator[tuple[NBest, Ranking]]

_INFINITE = {"log_base": -math.inf, "energy": math.inf, "log_score": -math.inf}  # what is null in the file


def score_file(model: ResidualModel, path: Path, folder: Path, *, ends: bool, progress: Progress) -> Scored:
    """Every list of a file with the ranking of its candidates; what was scored before is read."""
    total = sum(1 for _ in read_lists(path))
    first = _scored(model, next(read_lists(path)), path, ends)
    asked = {"version": version("freenergy"), "file": file_hash(path), "ends": ends, "first": first}
    kept = folder / f"{fingerprint(asked)}.jsonl"
    if not kept.is_file():
        with progress.track(f"scores of {path.name}", total, "lists") as advance, resumable_jsonl(kept, asked) as lines:
            advance(lines.done)
            for one in islice(read_lists(path), lines.done, None):
                lines.add(_scored(model, one, path, ends))
                advance(1)
    return _read(path, kept)


def _scored(model: ResidualModel, one: NBest, path: Path, ends: bool) -> list[dict[str, Any]]:
    try:
        ranking = model.score(one.prefix, one.candidates, ends=ends)
    except UserError as error:
        raise UserError(f"{path}, line {one.line}: {error}") from error
    return [candidate.to_json() for candidate in ranking.candidates]


def _read(path: Path, kept: Path) -> Scored:
    with kept.open(encoding="utf-8") as file:
        for one, line in zip(read_lists(path), file, strict=True):
            yield one, Ranking(one.prefix, tuple(Ranked(**_INFINITE | _known(row)) for row in json.loads(line)))


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None or name not in _INFINITE}
