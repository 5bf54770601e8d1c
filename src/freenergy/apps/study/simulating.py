"""Simulated raters, to check the statistics.

    P(B is chosen) = preference for every pair and rater,      P(a known answer is found) = attention

They go through the same pages, store and counting as people do, and are labelled as simulated for good. With three
votes kept, a pair is for B with probability p³ + 3p²(1 − p), p = preference.
"""

import torch

from freenergy.apps.study.assigning import End, answer, next_page
from freenergy.apps.study.store import Rater, Store
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng

_SILENT = Silent()


def simulate(
    store: Store,
    raters: int,
    *,
    preference: float = 0.5,
    attention: float = 0.9,
    seed: int = 0,
    progress: Progress = _SILENT,
) -> int:
    """Invite simulated raters and let them answer all their pages; returns the number of pages."""
    for name, value in (("preference", preference), ("attention", attention)):
        if not 0 <= value <= 1:
            raise UserError(f"the {name} is {value:g}: give a probability from 0 to 1")
    with store.transaction() as db:
        query = "SELECT 1 FROM votes JOIN raters ON raters.id = rater WHERE NOT is_simulated LIMIT 1"
        are_there_people = db.execute(query).fetchone() is not None
    if are_there_people:
        raise UserError(
            f"human raters have answered the study in {store.study.folder}: simulate on a copy, without its answers"
        )
    labels = {invitation.label for invitation in store.invite(raters, simulated=True)}
    at_work = [rater for rater in store.raters() if rater.label in labels]
    pages = 0
    with progress.track("rating", None, "pages") as advance:
        while at_work:
            at_work = [rater for rater in at_work if _rate(store, rater, preference, attention, Rng(seed))]
            pages += len(at_work)
            advance(len(at_work))
    return pages


def _rate(store: Store, rater: Rater, preference: float, attention: float, rng: Rng) -> bool:
    """Answer one page of one rater; returns False if there is none."""
    page = next_page(store, rater)
    if isinstance(page, End):
        return False
    chances = torch.tensor([preference if place.item.kind == "pair" else attention for place in page.places])
    coins = rng.child("simulated", rater.id, page.kind, page.number).bernoulli(chances).tolist()
    answers = {i: 1 if (shown.first == "b") == bool(coins[i]) else 2 for i, shown in enumerate(page.places)}
    answer(store, rater, page.token, answers)
    return True
