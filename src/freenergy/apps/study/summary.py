"""What the votes say: which model is preferred, whether that can be chance, and whether raters agree.

    k of n pairs are for B:     rate = k/n,     p = P(X ≥ k), X ~ Binomial(n, 1/2)     (one-sided, exact)

A pair is for the model that more raters chose. Where votes were dropped a pair may be a tie, and there are three ways
to count it. Table 2 of Deng et al. (2020) has the first two; docs/study.md shows that its n holds ties.

    strict      A < B   k = pairs for B            n = all pairs with votes   ties count against B
    not worse   A ≤ B   k = pairs for B and ties   n = all pairs with votes   ties count for B
    decided     A < B   k = pairs for B            n = pairs for A or B       ties left out: the sign test

Agreement beyond chance:

    n_uc votes of value c for unit u,  m_u = Σ_c n_uc ≥ 2,  n_c = Σ_u n_uc,  n = Σ_c n_c

    share of agreeing pairs of votes = Σ_u Σ_c n_uc (n_uc − 1) / Σ_u m_u (m_u − 1)
    α = 1 − D_o/D_e,   D_o = 1/n Σ_u (m_u² − Σ_c n_uc²)/(m_u − 1),   D_e = (n² − Σ_c n_c²)/(n (n − 1))

α is Krippendorff's for nominal values, which takes any number of raters and missing votes: 1 is agreement, 0 is what
chance gives. Units with one vote say nothing about agreement and are left out. The interval is a bootstrap over units.

Votes are dropped as in Deng et al. (2020), A.4: where a rater did not find the real text in a page's attention check,
the page's other votes do not count. They are not collected again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest

from freenergy.apps.study.items import Study
from freenergy.apps.study.store import Ballot, Rater, Store, ballots
from freenergy.core.errors import UserError
from freenergy.core.files import write_json
from freenergy.core.rng import Rng
from freenergy.report.study import STUDIES

SUMMARY = "summary.json"
_EXAMPLES = 3  # per model
_RESAMPLES = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A rate with its test. The interval is Clopper and Pearson's, of 95 %, two-sided; None where n is 0."""

    k: int
    n: int
    rate: float | None
    p_value: float | None
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, k: int, n: int) -> "Preference":
        """Compute it for k of n."""
        if not 0 <= k <= n:
            raise UserError(f"{k} of {n} pairs is impossible: give a count from 0 to {n}")
        if n == 0:
            return cls(k=0, n=0, rate=None, p_value=None, interval=None)
        found = binomtest(k, n, 0.5).proportion_ci(0.95, method="exact")
        p_value = float(binomtest(k, n, 0.5, alternative="greater").pvalue)
        return cls(k=k, n=n, rate=k / n, p_value=p_value, interval=(float(found.low), float(found.high)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Counts of pairs for A, for B, and for neither."""

    a: int
    b: int
    ties: int

    @classmethod
    def of(cls, votes: list[tuple[int, int]]) -> "Outcomes":
        """Count from the votes for A and B of each pair; pairs without a vote are skipped, not ties."""
        asked = [(a, b) for a, b in votes if a + b]
        return cls(a=sum(a > b for a, b in asked), b=sum(b > a for a, b in asked), ties=sum(a == b for a, b in asked))

    def tests(self) -> dict[str, Preference]:
        """Return the test under each of the three ways to count ties."""
        decided, pairs = self.a + self.b, self.a + self.b + self.ties
        return {
            "decided": Preference.of(self.b, decided),
            "strict": Preference.of(self.b, pairs),
            "not_worse": Preference.of(self.b + self.ties, pairs),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement over units with two votes or more; None if undefined, as when all votes are the same."""

    units: int
    share: float | None
    alpha: float | None
    interval: tuple[float, float] | None  # of alpha, 95 %


def agreement(counts: Float[np.ndarray, "U C"], rng: Rng) -> Agreement:
    """Compute it from the votes for each of C values in U units."""
    kept = counts[counts.sum(1) >= 2]
    U, m = len(kept), kept.sum(1)
    if U == 0:
        return Agreement(units=0, share=None, alpha=None, interval=None)
    share = float((kept * (kept - 1)).sum() / (m * (m - 1)).sum())
    (alpha,) = _alpha(kept, np.ones((1, U)))
    places = (rng.uniform(_RESAMPLES, U).numpy() * U).astype(np.int64)
    times = np.stack([np.bincount(row, minlength=U) for row in places]).astype(np.float64)
    found = _alpha(kept, times)
    found = found[np.isfinite(found)]
    if not np.isfinite(alpha):
        return Agreement(units=U, share=share, alpha=None, interval=None)
    low, high = np.quantile(found, [0.025, 0.975])
    return Agreement(units=U, share=share, alpha=float(alpha), interval=(float(low), float(high)))


def _alpha(counts: Float[np.ndarray, "U C"], times: Float[np.ndarray, "R U"]) -> Float[np.ndarray, " R"]:
    """Return α of R resamples, in each of which unit u occurs ``times`` often; NaN if all votes are the same."""
    m = counts.sum(1)
    disagreeing = (m**2 - (counts**2).sum(1)) / (m - 1)
    n_c = times @ counts
    n = n_c.sum(1)
    observed, expected = times @ disagreeing / n, (n**2 - (n_c**2).sum(1)) / (n * (n - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected > 0, 1 - observed / expected, np.nan)


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
    by_rater = [_of_rater(study, rater, votes, failed) for rater in store.raters()]
    counts = np.array(list(by_pair.values()), dtype=np.float64).reshape(-1, 2)
    return {
        "study": study.name,
        "models": study.models,
        "settings": {"votes": study.settings.votes, "seed": study.settings.seed},
        "raters": _raters(by_rater),
        "pairs": _pairs(study, on_pairs, by_pair),
        "votes": {"given": len(on_pairs), "dropped": len(on_pairs) - len(kept), "kept": len(kept)},
        "attention": {"asked": len({vote.page for vote in votes if vote.kind == "task"}), "failed": len(failed)},
        "outcomes": asdict(outcomes),
        "tests": {name: asdict(test) for name, test in outcomes.tests().items()},
        "agreement": asdict(agreement(counts, Rng(study.settings.seed).child("agreement"))),
        "seconds_a_page": _median(votes),
        "by_rater": by_rater,
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


def _raters(by_rater: Sequence[dict[str, Any]]) -> dict[str, int]:
    verdicts = Counter(rater["is_qualified"] for rater in by_rater)
    return {
        "invited": len(by_rater),
        "simulated": sum(rater["is_simulated"] for rater in by_rater),
        "qualified": verdicts[True],
        "not_qualified": verdicts[False],
        "voted": sum(rater["pages"] > 0 for rater in by_rater),
    }


def _median(votes: Sequence[Ballot]) -> float | None:
    """Return the median seconds per page, which ignores pauses."""
    seconds = {vote.page: vote.seconds for vote in votes if vote.kind == "task"}
    return median(seconds.values()) if seconds else None


def _of_rater(study: Study, rater: Rater, votes: Sequence[Ballot], failed: set[int]) -> dict[str, Any]:
    mine = [vote for vote in votes if vote.rater == rater.id]
    task = [vote for vote in mine if vote.kind == "task"]
    on_pairs = [vote for vote in task if study.items[vote.item].kind == "pair"]
    answers = [vote.choice == "b" for vote in mine if vote.kind == "qualification"]
    right, given, asked = sum(answers), len(answers), len(study.of("qualification"))
    pages = {vote.page for vote in task}
    return {
        "label": rater.label,
        "is_simulated": rater.is_simulated,
        "qualification": {"right": right, "given": given},
        "is_qualified": study.settings.passes(right, asked) if given == asked else None,  # None: not finished
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
