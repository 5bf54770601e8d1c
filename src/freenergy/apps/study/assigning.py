"""Who compares what: pages of four, handed out and taken back in transactions.

    page = three pairs with the fewest votes + one attention check, in random order; sides shuffled by the seed

A pair is on at most ``votes`` pages that are open or answered, and never twice on those of one rater. A page that
is not answered for an hour goes to another rater as soon as one asks for work; until then its rater may still answer.
"""

import secrets
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch

from freenergy.apps.study.items import ITEMS_PER_PAGE, Item
from freenergy.apps.study.store import PageKind, Rater, Store, Text, ballots
from freenergy.core.rng import Rng

EXPIRES_SECONDS = 3600.0
Why = Literal["finished", "waiting", "not qualified"]


class ShownItem(NamedTuple):
    """A comparison as it is shown: ``first`` is the text on the left."""

    item: Item
    first: Text

    @property
    def texts(self) -> tuple[str, str]:
        """Text 1 and text 2, as shown."""
        return (self.item.a, self.item.b) if self.first == "a" else (self.item.b, self.item.a)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page that a rater has to answer now."""

    token: str
    kind: PageKind
    number: int  # from 1, among the pages of its kind
    of: int  # number of pages, or an upper bound
    places: tuple[ShownItem, ...]


class End(NamedTuple):
    """Nothing is left to do, and why; ``pages`` of pairs were answered."""

    why: Why
    pages: int


class RefusedError(Exception):
    """Answers that are not counted."""

    def __init__(self, why: Literal["unknown", "expired", "incomplete", "changed"]) -> None:
        super().__init__(why)
        self.why = why


def next_page(store: Store, rater: Rater) -> Page | End:
    """Return the rater's open page, or a new one."""
    with store.transaction() as db:
        row = db.execute("SELECT id FROM pages WHERE rater = ? AND state = 'open'", (rater.id,)).fetchone()
        page = None if row is None else int(row["id"])
        if page is None:
            expired = (store.clock() - EXPIRES_SECONDS,)
            db.execute("UPDATE pages SET state = 'expired' WHERE state = 'open' AND seen < ?", expired)
            found = _choose(store, db, rater)
            if isinstance(found, End):
                return found
            page = _open(store, db, rater, *found)
        db.execute("UPDATE pages SET seen = ? WHERE id = ?", (store.clock(), page))
        return _read(store, db, rater, page)


def answer(store: Store, rater: Rater, token: str, sides: Mapping[int, int]) -> bool:
    """Store the answers of a page, 1 or 2 for each place; returns False if they were stored before."""
    with store.transaction() as db:
        page = db.execute("SELECT * FROM pages WHERE token = ? AND rater = ?", (token, rater.id)).fetchone()
        if page is None:
            raise RefusedError("unknown")
        if page["state"] == "answered":
            counted = db.execute("SELECT place, side FROM votes WHERE page = ?", (page["id"],)).fetchall()
            if {row["place"]: row["side"] for row in counted} != dict(sides):
                raise RefusedError("changed")
            return False
        if page["state"] == "expired":
            raise RefusedError("expired")
        places = db.execute("SELECT place, item FROM places WHERE page = ? ORDER BY place", (page["id"],)).fetchall()
        if set(sides) != {row["place"] for row in places} or not set(sides.values()) <= {1, 2}:
            raise RefusedError("incomplete")
        votes = [(page["id"], row["place"], rater.id, row["item"], sides[row["place"]]) for row in places]
        db.executemany("INSERT INTO votes VALUES (?, ?, ?, ?, ?)", votes)
        db.execute("UPDATE pages SET state = 'answered', answered = ? WHERE id = ?", (store.clock(), page["id"]))
    return True


def _choose(store: Store, db: sqlite3.Connection, rater: Rater) -> tuple[PageKind, list[Item]] | End:
    """Return the comparisons of a new page, in display order."""
    settings = store.study.settings
    done = {row["item"] for row in db.execute("SELECT item FROM votes WHERE rater = ?", (rater.id,))}
    rng = Rng(settings.seed).child("rater", rater.id)
    questions = _shuffled(store.items["qualification"], rng.child("qualification"))
    if left := [item for item in questions if item.number not in done]:
        return "qualification", left[:ITEMS_PER_PAGE]
    pages = _answered(db, rater, "task")
    right = sum(vote.choice == "b" for vote in ballots(db, rater.id) if vote.kind == "qualification")
    if not settings.passes(right, len(questions)):
        return End("not qualified", pages)
    pairs, is_waiting = _pairs(store, db, rater, done)
    checks = [item for item in _shuffled(store.items["check"], rng.child("checks")) if item.number not in done]
    if pages == settings.pages or not pairs or not checks:
        return End("waiting" if is_waiting and checks and pages != settings.pages else "finished", pages)
    chosen = [*pairs[: ITEMS_PER_PAGE - 1], checks[0]]
    return "task", _shuffled(chosen, rng.child("page", pages))


def _pairs(store: Store, db: sqlite3.Connection, rater: Rater, done: set[int]) -> tuple[list[Item], bool]:
    """Return the pairs that the rater may get, fewest votes first; and whether others may become free."""
    query = """SELECT item, COUNT(*) AS asked, SUM(state = 'open') AS open FROM places JOIN pages ON pages.id = page
               WHERE kind = 'task' AND state <> 'expired' GROUP BY item"""
    rows = db.execute(query).fetchall()
    asked, is_open = (Counter({row["item"]: row[name] for row in rows}) for name in ("asked", "open"))
    rng = Rng(store.study.settings.seed).child("rater", rater.id, "pairs")
    left = [item for item in _shuffled(store.items["pair"], rng) if item.number not in done]
    free = [item for item in left if asked[item.number] < store.study.settings.votes]
    return sorted(free, key=lambda item: asked[item.number]), any(is_open[item.number] for item in left)


def _answered(db: sqlite3.Connection, rater: Rater, kind: PageKind) -> int:
    query = "SELECT COUNT(*) FROM pages WHERE rater = ? AND kind = ? AND state = 'answered'"
    return int(db.execute(query, (rater.id, kind)).fetchone()[0])


def _shuffled(items: Sequence[Item], rng: Rng) -> list[Item]:
    return [items[i] for i in rng.permutation(len(items)).tolist()]


def _open(store: Store, db: sqlite3.Connection, rater: Rater, kind: PageKind, items: list[Item]) -> int:
    """Store a new page and its items; returns its id."""
    now = store.clock()
    row = (rater.id, secrets.token_urlsafe(32), kind, now, now)
    insert = "INSERT INTO pages (rater, token, kind, state, opened, seen) VALUES (?, ?, ?, 'open', ?, ?)"
    page = db.execute(insert, row).lastrowid
    assert page is not None
    firsts = _firsts(store, rater)
    places = [(page, i, item.number, firsts[item.number]) for i, item in enumerate(items)]
    db.executemany("INSERT INTO places VALUES (?, ?, ?, ?)", places)
    return page


def _firsts(store: Store, rater: Rater) -> list[Text]:
    """Return which text of each item is shown first: one fair coin per item, from the rater's own stream."""
    rng = Rng(store.study.settings.seed).child("rater", rater.id, "sides")
    fair = torch.full((len(store.study.items),), 0.5)
    return ["b" if coin else "a" for coin in rng.bernoulli(fair).tolist()]


def _read(store: Store, db: sqlite3.Connection, rater: Rater, page: int) -> Page:
    row = db.execute("SELECT * FROM pages WHERE id = ?", (page,)).fetchone()
    rows = db.execute("SELECT * FROM places WHERE page = ? ORDER BY place", (page,)).fetchall()
    places = tuple(ShownItem(store.study.items[place["item"]], place["first"]) for place in rows)
    before = _answered(db, rater, row["kind"])
    of = before + _ahead(store, db, rater, row["kind"], before)
    return Page(token=row["token"], kind=row["kind"], number=before + 1, of=of, places=places)


def _ahead(store: Store, db: sqlite3.Connection, rater: Rater, kind: PageKind, before: int) -> int:
    """Return how many pages of this kind the rater gets, the open one included; for pairs an upper bound."""
    if kind == "qualification":
        return -(-len(store.items["qualification"]) // ITEMS_PER_PAGE) - before
    query = "SELECT item FROM places JOIN pages ON pages.id = page WHERE rater = ? AND state <> 'expired'"
    seen = {row["item"] for row in db.execute(query, (rater.id,))}
    pairs, _ = _pairs(store, db, rater, seen)
    checks = sum(item.number not in seen for item in store.items["check"])
    more = 1 + min(-(-len(pairs) // (ITEMS_PER_PAGE - 1)), checks)
    most = store.study.settings.pages
    return more if most is None else min(more, most - before)
