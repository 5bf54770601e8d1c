"""A study on disk: its settings, and the texts that raters compare.

    STUDY/study.json      settings, models, fingerprints, versions
    STUDY/items.jsonl     one comparison a line: its prefix and two continuations
    STUDY/answers.sqlite  raters, pages and votes (``freenergy.apps.study.store``)

A *pair* is one continuation of each model for the same prefix. A *check* and a *qualification* question have a known
answer: ``a`` is a draw of the base and ``b`` the real text.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json, write_text

RECORD, ITEMS, ANSWERS = "study.json", "items.jsonl", "answers.sqlite"
Kind = Literal["pair", "check", "qualification"]
KINDS: tuple[Kind, ...] = ("pair", "check", "qualification")
ITEMS_PER_PAGE = 4  # comparisons, one of them an attention check (Deng et al. 2020, A.4)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Defaults are the study of Deng et al. (2020), A.4."""

    prefixes: int = 333
    votes: int = 3  # per pair
    qualification: int = 12  # questions with a known answer, before the first pair; 0 asks none
    pass_mark: float = 2 / 3  # raters with at most this share of right answers are excluded
    checks: int | None = None  # attention checks; None: one per page of a rater who sees every pair
    pages: int | None = None  # maximum pages of pairs per rater; None: no limit
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "prefixes", "votes", "checks", "pages", at_least=1)
        check_range(self, "qualification", at_least=0)
        check_range(self, "pass_mark", at_least=0, below=1)

    @property
    def num_checks(self) -> int:
        """The number of attention checks: as set, or enough that no rater sees one twice."""
        return -(-self.prefixes // (ITEMS_PER_PAGE - 1)) if self.checks is None else self.checks

    def passes(self, right: int, asked: int) -> bool:
        """Whether ``right`` answers out of ``asked`` qualification questions suffice."""
        return not asked or right > self.pass_mark * asked


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One comparison that raters see."""

    number: int
    kind: Kind
    prefix: str
    a: str
    b: str

    @property
    def is_same(self) -> bool:
        """Whether both texts are identical; such a pair is not shown."""
        return self.a == self.b


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A human study: settings, models and comparisons."""

    folder: Path
    settings: StudySettings
    models: dict[str, dict[str, Any]]  # of "a" and "b": name, run, law, …
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def mark(self) -> str:
        """Identifies settings and texts, so that answers are not counted for others."""
        return fingerprint([asdict(self.settings), [asdict(item) for item in self.items]])

    def of(self, kind: Kind) -> tuple[Item, ...]:
        """Return the comparisons of one kind; identical pairs are left out."""
        return tuple(item for item in self.items if item.kind == kind and not item.is_same)

    @classmethod
    def open(cls, folder: str | Path) -> "Study":
        """Load a study; raises ``UserError`` if it is incomplete or damaged."""
        folder = Path(folder)
        if not (folder / RECORD).is_file():
            raise UserError(f"{folder} is not a study: give a folder that `freenergy study create` wrote")
        if not (folder / ITEMS).is_file():
            raise UserError(f"the study in {folder} is incomplete: run `freenergy study create` again to resume")
        record = read_json(folder / RECORD)
        try:
            with (folder / ITEMS).open(encoding="utf-8") as lines:  # not splitlines: a text may contain U+2028
                items = tuple(Item(**json.loads(line)) for line in lines)
            if [item.number for item in items] != list(range(len(items))):
                raise ValueError(f"lines of {ITEMS} are missing")
            settings = StudySettings(**record["settings"])
            return cls(folder=folder, settings=settings, models=record["models"], items=items)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{folder} is damaged or of another version ({error}): create the study again") from None

    def write(self, about: dict[str, Any] | None = None) -> "Study":
        """Write a study with given texts, and return it."""
        write_record(self.folder, self.settings, self.models, about or {})
        lines = [json.dumps(asdict(item), ensure_ascii=False) for item in self.items]
        write_text(self.folder / ITEMS, "".join(line + "\n" for line in lines))
        return self


def write_record(
    folder: Path, settings: StudySettings, models: dict[str, dict[str, Any]], about: dict[str, Any]
) -> None:
    """Write study.json."""
    write_json(folder / RECORD, {"settings": asdict(settings), "models": models, **about})
