"""The summary of a study: one object, from which the table, the page and ``summary.json`` are made.

Votes are dropped as in Deng et al. (2020), A.4: where a rater did not find the real text in a page's attention check,
the page's other votes do not count. They are not collected again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from freenergy.apps.study.items import Study
from freenergy.apps.study.statistics import Outcomes, agreement
from freenergy.apps.study.store import Ballot, Rater, Store, ballots
from freenergy.core.files import write_json
from freenergy.core.rng import Rng
from freenergy.report.study import STUDIES

SUMMARY = "summary.json"
_EXAMPLES = 3  # per model


def summarise(store: Store) -> dict[str, Any]:
    """Compute the summary of a study."""
    study = store.study
    with store.transaction() as db:
        votes = ballots(db)
    failed = {vote.page for vote in votes if study.items[vote.item].kind == "check" and vote.choice != "b"}
    on_pairs = [vote for vote in votes if study.items[vote.item].kind == "pair"]
    kept = [vote for vote in on_pairs if vote.page not in failed]
    by_pair = _by_pair(study, kept)
    outcomes = Outcomes.of(list(by_pair.values()))
    raters = store.raters()
    counts = np.array(list(by_pair.values()), dtype=np.float64).reshape(-1, 2)
    return {
        "study": study.name,
        "models": study.models,
        "settings": {"votes": study.settings.votes, "seed": study.settings.seed},
        "raters": _raters(study, raters, votes),
        "pairs": _pairs(study, on_pairs, by_pair),
        "votes": {"given": len(on_pairs), "dropped": len(on_pairs) - len(kept), "kept": len(kept)},
        "attention": {"asked": len({vote.page for vote in votes if vote.kind == "task"}), "failed": len(failed)},
        "outcomes": asdict(outcomes),
        "tests": {name: asdict(test) for name, test in outcomes.tests().items()},
        "agreement": asdict(agreement(counts, Rng(study.settings.seed).child("agreement"))),
        "seconds_a_page": _median(votes),
        "by_rater": [_of_rater(study, rater, votes, failed) for rater in raters],
        "by_pair": [{"item": item, "a": a, "b": b} for item, (a, b) in by_pair.items()],
        "examples": _examples(study, by_pair),
    }


def write_summary(study: Study, summary: dict[str, Any]) -> list[Path]:
    """Write the summary into the study, and a copy into each compared run; returns the paths."""
    paths = [study.folder / SUMMARY]
    for model in study.models.values():
        run = model.get("run")
        if run is not None and Path(run).is_dir():
            paths.append(Path(run) / STUDIES / f"{study.name}.json")
    paths = list(dict.fromkeys(paths))
    for path in paths:
        write_json(path, summary)
    return paths


def _by_pair(study: Study, kept: Sequence[Ballot]) -> dict[int, tuple[int, int]]:
    """Return the votes for A and B of each pair of different texts."""
    found = Counter((vote.item, vote.choice) for vote in kept)
    return {item.number: (found[item.number, "a"], found[item.number, "b"]) for item in study.of("pair")}


def _pairs(study: Study, on_pairs: Sequence[Ballot], by_pair: dict[int, tuple[int, int]]) -> dict[str, int]:
    asked = Counter(vote.item for vote in on_pairs)
    return {
        "asked": len(by_pair),
        "same": sum(item.kind == "pair" and item.is_same for item in study.items),
        "with_votes": sum(a + b > 0 for a, b in by_pair.values()),
        "complete": sum(count >= study.settings.votes for count in asked.values()),
    }


def _raters(study: Study, raters: Sequence[Rater], votes: Sequence[Ballot]) -> dict[str, int]:
    verdicts = Counter(_qualified(study, rater, votes) for rater in raters)
    return {
        "invited": len(raters),
        "simulated": sum(rater.is_simulated for rater in raters),
        "qualified": verdicts[True],
        "not_qualified": verdicts[False],
        "voted": len({vote.rater for vote in votes if vote.kind == "task"}),
    }


def _right(rater: Rater, votes: Sequence[Ballot]) -> tuple[int, int]:
    """Return the right answers in the qualification, and their number."""
    given = [vote.choice == "b" for vote in votes if vote.rater == rater.id and vote.kind == "qualification"]
    return sum(given), len(given)


def _qualified(study: Study, rater: Rater, votes: Sequence[Ballot]) -> bool | None:
    """Whether a rater passed; None if the qualification is not finished."""
    right, given = _right(rater, votes)
    asked = len(study.of("qualification"))
    return study.settings.passes(right, asked) if given == asked else None


def _median(votes: Sequence[Ballot]) -> float | None:
    """Return the median seconds per page, which ignores pauses."""
    seconds = {vote.page: vote.seconds for vote in votes if vote.kind == "task"}
    return median(seconds.values()) if seconds else None


def _of_rater(study: Study, rater: Rater, votes: Sequence[Ballot], failed: set[int]) -> dict[str, Any]:
    mine = [vote for vote in votes if vote.rater == rater.id]
    task = [vote for vote in mine if vote.kind == "task"]
    on_pairs = [vote for vote in task if study.items[vote.item].kind == "pair"]
    right, given = _right(rater, votes)
    pages = {vote.page for vote in task}
    return {
        "label": rater.label,
        "is_simulated": rater.is_simulated,
        "qualification": {"right": right, "given": given},
        "is_qualified": _qualified(study, rater, votes),
        "pages": len(pages),
        "checks_failed": len(pages & failed),
        "votes": len(on_pairs),
        "dropped": sum(vote.page in failed for vote in on_pairs),
        "for_b": sum(vote.choice == "b" for vote in on_pairs if vote.page not in failed),
        "text_1": sum(vote.side == 1 for vote in on_pairs),
        "seconds_a_page": _median(mine),
    }


def _examples(study: Study, by_pair: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the first pairs with unanimous votes, for B and for A."""
    full = study.settings.votes
    found = []
    for wanted in ((0, full), (full, 0)):
        numbers = [number for number, votes in by_pair.items() if votes == wanted][:_EXAMPLES]
        rows = [(study.items[number], *by_pair[number]) for number in numbers]
        found += [{"prefix": i.prefix, "a": i.a, "b": i.b, "for_a": a, "for_b": b} for i, a, b in rows]
    return found
