"""The votes, with the shuffling of sides undone.

text 1 is ``first``, text 2 the other:     choice = first if side = 1, else the other
"""

import sqlite3
from dataclasses import dataclass
from typing import Literal, final

Text = Literal["a", "b"]
_QUERY = """
SELECT votes.page, votes.rater, votes.item, votes.side, places.first, pages.kind, pages.opened, pages.answered
FROM votes JOIN places USING (page, place) JOIN pages ON pages.id = votes.page
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """One vote of a rater."""

    page: int
    rater: int
    item: int
    kind: Literal["qualification", "task"]
    side: int  # 1 or 2, as shown
    choice: Text
    seconds: float  # from the first display of the page to its answer


def chosen(first: Text, side: int) -> Text:
    """Return the text that was shown on a side."""
    other: Text = "b" if first == "a" else "a"
    return first if side == 1 else other


def ballots(db: sqlite3.Connection, rater: int | None = None) -> list[Ballot]:
    """Return all votes, or those of one rater, in the order of pages and places."""
    where, values = ("", ()) if rater is None else ("WHERE votes.rater = ?", (rater,))
    rows = db.execute(f"{_QUERY} {where} ORDER BY votes.page, votes.place", values)
    return [
        Ballot(
            page=row["page"],
            rater=row["rater"],
            item=row["item"],
            kind=row["kind"],
            side=row["side"],
            choice=chosen(row["first"], row["side"]),
            seconds=row["answered"] - row["opened"],
        )
        for row in rows
    ]
