"""Answers that are never lost: one SQLite file, a transaction for every page.

    raters  1 ─ n  pages  1 ─ n  places  1 ─ 1  votes          STUDY/answers.sqlite (WAL, synchronous = FULL)

A commit is on disk before it is acknowledged. What must not happen is forbidden by the tables themselves: a rater has
at most one open page, a place has at most one vote, and a rater at most one vote for an item. Of invitations and
sessions only the SHA-256 is kept, so that a reader of the file cannot vote. A ballot undoes the shuffling of sides: its
choice is ``first`` where side 1 was taken, else the other text.
"""

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from freenergy.apps.study.items import ANSWERS, KINDS, Study
from freenergy.core.errors import UserError

Text = Literal["a", "b"]
PageKind = Literal["qualification", "task"]
_VERSION = 1
_WAIT_SECONDS = 30.0  # for the lock of another process
_SCHEMA = """
CREATE TABLE study (mark TEXT NOT NULL);
CREATE TABLE raters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    label TEXT NOT NULL UNIQUE,
    token TEXT NOT NULL UNIQUE,
    is_simulated INTEGER NOT NULL CHECK (is_simulated IN (0, 1))
);
CREATE TABLE sessions (
    token TEXT PRIMARY KEY,
    rater INTEGER NOT NULL REFERENCES raters (id)
);
CREATE TABLE pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    rater INTEGER NOT NULL REFERENCES raters (id),
    token TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('qualification', 'task')),
    state TEXT NOT NULL CHECK (state IN ('open', 'answered', 'expired')),
    opened REAL NOT NULL,
    seen REAL NOT NULL,
    answered REAL
);
CREATE UNIQUE INDEX one_open_page ON pages (rater) WHERE state = 'open';
CREATE TABLE places (
    page INTEGER NOT NULL REFERENCES pages (id),
    place INTEGER NOT NULL,
    item INTEGER NOT NULL,
    first TEXT NOT NULL CHECK (first IN ('a', 'b')),
    PRIMARY KEY (page, place),
    UNIQUE (page, item)
);
CREATE TABLE votes (
    page INTEGER NOT NULL,
    place INTEGER NOT NULL,
    rater INTEGER NOT NULL REFERENCES raters (id),
    item INTEGER NOT NULL,
    side INTEGER NOT NULL CHECK (side IN (1, 2)),
    PRIMARY KEY (page, place),
    UNIQUE (rater, item),
    FOREIGN KEY (page, place) REFERENCES places (page, place)
);
"""
_BALLOTS = """
SELECT votes.page, votes.rater, votes.item, votes.side, places.first, pages.kind, pages.opened, pages.answered
FROM votes JOIN places USING (page, place) JOIN pages ON pages.id = votes.page
"""


class Invitation(NamedTuple):
    """A rater's label, and the token, which is shown once."""

    label: str
    token: str


class Rater(NamedTuple):
    """An invited rater."""

    id: int
    label: str
    is_simulated: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One vote of a rater."""

    page: int
    rater: int
    item: int
    kind: PageKind
    side: int  # 1 or 2, as shown
    choice: Text
    seconds: float  # from the first display of the page to its answer


@final
class Store:
    """The answers of a study; safe to use from several threads and processes."""

    def __init__(self, study: Study, *, in_memory: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.study = study
        self.clock = clock
        self.items = {kind: study.of(kind) for kind in KINDS}  # read for every page
        self._lock = threading.Lock()
        path = ":memory:" if in_memory else study.folder / ANSWERS
        try:
            self._db = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self._db.execute(f"PRAGMA {pragma}")
            self._prepare()
        except sqlite3.Error as error:
            raise UserError(
                f"{path} cannot be opened ({error}): close other programs that use it or fix its folder, then try again"
            ) from None

    def _prepare(self) -> None:
        """Create the tables, or check that they belong to this study."""
        with self.transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute("INSERT INTO study VALUES (?)", (self.study.mark,))
                db.execute(f"PRAGMA user_version = {_VERSION}")
                return
            found = db.execute("SELECT mark FROM study").fetchone()["mark"] if version == _VERSION else None
        if found != self.study.mark:
            where = self.study.folder / ANSWERS
            raise UserError(f"{where} has answers to other texts or of another version: move it, and invite again")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one exclusive transaction; committed to disk when the block ends."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled it back already
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def invite(self, num: int, *, simulated: bool = False) -> list[Invitation]:
        """Create raters; only hashes of their tokens are stored."""
        if num < 1:
            raise UserError(f"cannot invite {num} raters: use 1 or more")
        found = []
        with self.transaction() as db:
            kind = "simulated" if simulated else "rater"
            (before,) = db.execute("SELECT COUNT(*) FROM raters WHERE is_simulated = ?", (int(simulated),)).fetchone()
            for number in range(before + 1, before + num + 1):
                invitation = Invitation(f"{kind} {number}", secrets.token_urlsafe(32))
                row = (invitation.label, _hidden(invitation.token), int(simulated))
                db.execute("INSERT INTO raters (label, token, is_simulated) VALUES (?, ?, ?)", row)
                found.append(invitation)
        return found

    def enter(self, token: str) -> str | None:
        """Return a new session for the rater with this invitation; None if the token is unknown."""
        with self.transaction() as db:
            row = db.execute("SELECT id FROM raters WHERE token = ?", (_hidden(token),)).fetchone()
            if row is None:
                return None
            session = secrets.token_urlsafe(32)
            db.execute("INSERT INTO sessions VALUES (?, ?)", (_hidden(session), row["id"]))
        return session

    def rater_of(self, session: str) -> Rater | None:
        """Return the rater of a session."""
        query = "SELECT raters.* FROM sessions JOIN raters ON raters.id = rater WHERE sessions.token = ?"
        with self.transaction() as db:
            row = db.execute(query, (_hidden(session),)).fetchone()
        return None if row is None else _rater(row)

    def raters(self) -> list[Rater]:
        """Return all invited raters, in order."""
        with self.transaction() as db:
            return [_rater(row) for row in db.execute("SELECT * FROM raters ORDER BY id")]


def _rater(row: sqlite3.Row) -> Rater:
    return Rater(row["id"], row["label"], bool(row["is_simulated"]))


def _hidden(token: str) -> str:
    """Return the stored hash of a token: with 256 random bits, an unsalted hash cannot be inverted."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def chosen(first: Text, side: int) -> Text:
    """Return the text that was shown on a side."""
    other: Text = "b" if first == "a" else "a"
    return first if side == 1 else other


def ballots(db: sqlite3.Connection, rater: int | None = None) -> list[Ballot]:
    """Return all votes, or those of one rater, in the order of pages and places."""
    where, values = ("", ()) if rater is None else ("WHERE votes.rater = ?", (rater,))
    rows = db.execute(f"{_BALLOTS} {where} ORDER BY votes.page, votes.place", values)
    kept = ("page", "rater", "item", "kind", "side")
    return [
        Ballot(
            **{name: row[name] for name in kept},
            choice=chosen(row["first"], row["side"]),
            seconds=row["answered"] - row["opened"],
        )
        for row in rows
    ]
