"""What there is to say of a file's lists apart from their ranks: counts, and the first place where something is odd."""

from pathlib import Path
from typing import final

from freenergy.text.nbest.nbest import NBest
from freenergy.text.ranking import Ranking


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
