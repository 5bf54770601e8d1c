"""A file of lists, ranked: with weights tuned on another file, and with errors counted where there are references.

    tune on DEV  →  λ          FILE, λ  →  a line a list: each candidate's score s and rank
    FILE         →  FOLDER/<fingerprint>.jsonl: a line a list, with the ranking of its candidates

The systems that choose are listed in docs/ranking.md; ties go to the earlier candidate. Lists are scored one at a time,
so a list's numbers do not depend on its neighbours. A killed scoring resumes after its last complete line and ends with
the same bits. The fingerprint names the file and settings and, by its scores of the first list, the model.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
from jaxtyping import Float

from freenergy.core.compatibility import ERA
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, exclusive_lock, file_hash, fingerprint, resumable_jsonl
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.lm.sample_only import has_log_prob
from freenergy.text.model import ResidualModel
from freenergy.text.nbest.combining import Combination, Development
from freenergy.text.nbest.combining import tune as find_weights
from freenergy.text.nbest.nbest import NBest, read_lists
from freenergy.text.nbest.significance import Tally
from freenergy.text.ranking import Ranked, Ranking
from freenergy.text.texts import finite

_SILENT = Silent()
Scored = Iterator[tuple[NBest, Ranking]]
_INFINITE = {"log_base": -math.inf, "energy": math.inf, "log_score": -math.inf}  # what is null in the file


@final
class Notes:
    """Lists, candidates, and those that were not scored quite as they read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = dict.fromkeys(("lists", "candidates", "apart", "misread", "uneven"), 0)
        self._first: dict[str, str] = {}

    def add(self, one: NBest, ranking: Ranking) -> None:
        """One list."""
        self.counts["lists"] += 1
        self.counts["candidates"] += len(ranking)
        for i, candidate in enumerate(ranking.candidates):
            where = f"line {one.line}, candidate {i + 1}"
            if candidate.is_apart:
                self._count("apart", where)
            if candidate.reads_as is not None:
                self._count("misread", f"{where}, {candidate.text[:40]!r} as {candidate.reads_as[:40]!r}")
        if len({candidate.tokens for candidate in ranking.candidates}) > 1:
            self._count("uneven", f"line {one.line}")

    def _count(self, what: str, where: str) -> None:
        self.counts[what] += 1
        self._first.setdefault(what, where)

    def sentences(self, ends: bool) -> list[str]:
        """One for each thing that a person should know."""
        apart, misread, uneven = (self.counts[name] for name in ("apart", "misread", "uneven"))
        found = []
        if apart:
            found.append(
                f"{apart} of {self.counts['candidates']} candidates in {self.path} were encoded apart from the prefix "
                f"(first: {self._first['apart']}), since the tokenizer joins across the border: cut between words"
            )
        if misread:
            found.append(
                f"{misread} of {self.counts['candidates']} candidates in {self.path} have tokens that read differently "
                f"(first: {self._first['misread']}): what they read is what is scored"
            )
        if uneven and not ends:
            found.append(
                f"{uneven} of {self.counts['lists']} lists in {self.path} have candidates of different length (first: "
                f"{self._first['uneven']}): if they are whole texts, score them as such (ends)"
            )
        return found


def rank_file(
    model: ResidualModel,
    path: str | Path,
    *,
    out: str | Path | None = None,
    tune: str | Path | None = None,
    ends: bool = False,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    resamples: int = 10_000,
    restarts: int = 8,
    progress: Progress = _SILENT,
) -> dict[str, Any]:
    """Rank every list of a JSON-lines file; see docs/ranking.md for the file and for what comes back.

    With ``out`` the ranked lists are written there, and a killed call resumes where it was; else they are in the
    result. ``tune`` names another file, whose lists have references or errors, to find the weights on; ``weights`` are
    where that begins, and otherwise the weights.
    """
    path, rng, aim = Path(path), Rng(seed).child("ranking"), None if out is None else Path(out)
    _check(path, aim, None if tune is None else Path(tune), resamples, restarts)
    combination, tuned, tally, notes = Combination(next(read_lists(path)).scores, weights), None, Tally(), Notes(path)
    with _folder(aim) as folder:
        if tune is not None:
            scored = score_file(model, Path(tune), folder, ends=ends, progress=progress)
            combination, tuned = _tuned(Path(tune), scored, combination, rng, restarts, progress)
        scored = score_file(model, path, folder, ends=ends, progress=progress)
        results = _written(_ranked(scored, combination, tuned is not None, tally, notes), aim)
    for sentence in notes.sentences(ends):
        progress.say(sentence)
    if not has_log_prob(model.base):
        progress.say("the base only samples: candidates are ranked by energy alone, and log_base is 0 for all of them")
    return {
        "file": str(path),
        "out": None if aim is None else str(aim),
        "ends": ends,
        "counts": notes.counts,
        "weights": combination.weights,
        "tuned": tuned,
        "errors": _errors(tally, rng, resamples) if len(tally) else None,
        "lists": results,
    }


def _check(path: Path, out: Path | None, tune: Path | None, resamples: int, restarts: int) -> None:
    if resamples < 100 or restarts < 0:
        raise UserError(f"{resamples} resamples, {restarts} restarts: ask for 100 or more and for 0 or more")
    if out is not None and out.resolve() in [file.resolve() for file in (path, tune) if file is not None]:
        raise UserError(f"{out} would be written over the lists that are read from it: choose another file to write")
    if tune is not None and tune.resolve() == path.resolve():
        raise UserError(f"{tune} would be tuned and measured on at once, which flatters: tune on other lists")
    files = [path] if tune is None else [path, tune]
    names = [{tuple(one.scores) for one in read_lists(file)}.pop() for file in files]  # a bad line is found here
    if len(set(names)) > 1:
        mine, theirs = (", ".join(one) or "none" for one in names)
        raise UserError(f"{tune} has the scores {theirs}, but {path} has {mine}: give both files the same")


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where scores are kept while they are made: next to the result, for the same call after a crash."""
    if out is None:
        with TemporaryDirectory() as passing:
            yield Path(passing)
        return
    folder = out.with_name(f".{out.name}.scores")
    with exclusive_lock(out, is_file=True):
        yield folder
        shutil.rmtree(folder)


def _tuned(
    path: Path, scored: Scored, combination: Combination, rng: Rng, restarts: int, progress: Progress
) -> tuple[Combination, dict[str, Any]]:
    """The weights found on development lists, and the errors there before and after."""
    try:
        development = Development.of(scored, combination)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    found = find_weights(development, combination, rng.child("tune"), restarts=restarts, progress=progress)
    after = Combination(combination.names[2:-1], found)
    rates = [development.total(weights.vector) / (development.units or 1) for weights in (combination, after)]
    return after, {"file": str(path), "lists": len(development.errors), "before": rates[0], "after": rates[1]}


def _ranked(
    scored: Scored, combination: Combination, is_tuned: bool, tally: Tally, notes: Notes
) -> Iterator[dict[str, Any]]:
    """One object a list; errors and oddities are counted on the way."""
    for one, ranking in scored:
        s = combination(one, ranking)
        notes.add(one, ranking)
        if one.unit is not None:
            tally.add(one, _choices(ranking, s, one.errors(), combination, is_tuned))
        ranks = np.argsort(np.argsort(-s, kind="stable")) + 1
        rows = [
            candidate.to_json() | {"score": finite(float(score)), "rank": int(rank)}
            for candidate, score, rank in zip(ranking.candidates, s, ranks, strict=True)
        ]
        best = one.candidates[int(s.argmax())]
        yield {"line": one.line, "id": one.name, "prefix": one.prefix, "best": best, "candidates": rows}


def _choices(
    ranking: Ranking, s: Float[np.ndarray, " N"], errors: Sequence[float], combination: Combination, is_tuned: bool
) -> dict[str, float]:
    """The errors of what each system chooses; of equals the earlier candidate."""
    log_base = [candidate.log_base for candidate in ranking.candidates]
    log_score = [candidate.log_score for candidate in ranking.candidates]
    found = {"first": errors[0], "base": errors[int(np.argmax(log_base))], "joint": errors[int(np.argmax(log_score))]}
    if is_tuned or not combination.is_joint:
        found["tuned" if is_tuned else "weighted"] = errors[int(s.argmax())]
    return found | {"oracle": min(errors)}


def _errors(tally: Tally, rng: Rng, resamples: int) -> dict[str, Any]:
    """Error rates, and what is better than what."""
    rates = tally.rates()
    last = next((name for name in ("tuned", "weighted") if name in rates), None)
    pairs = [("joint", "first"), ("joint", "base")] + ([] if last is None else [(last, "first"), (last, "joint")])
    rng = rng.child("bootstrap")
    return {
        "unit": tally.unit,
        "lists": len(tally),
        "documents": len(tally.units),
        "rates": rates,
        "comparisons": [tally.compare(a, b, rng, resamples) for a, b in pairs],
    }


def _written(rows: Iterator[dict[str, Any]], out: Path | None) -> list[dict[str, Any]] | None:
    if out is None:
        return list(rows)
    with atomic_write(out) as aside, aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    return None


def score_file(model: ResidualModel, path: Path, folder: Path, *, ends: bool, progress: Progress) -> Scored:
    """Every list of a file with the ranking of its candidates; what was scored before is read."""
    total = sum(1 for _ in read_lists(path))
    first = _scored(model, next(read_lists(path)), path, ends)
    asked = {"version": ERA, "file": file_hash(path), "ends": ends, "first": first}
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
