"""The tables of what models have written, next to human text."""

from collections.abc import Sequence
from typing import Any

from freenergy.core.format import DASH, interval, is_number, number
from freenergy.report.tables import ReportTable, share


def text_statistics(
    text: dict[str, Any], kinds: Sequence[str] = ("human", "base", "joint"), what: str = "Statistics of text"
) -> ReportTable:
    """Return diversity and novelty of each kind of text."""
    orders = ("2", "3", "4")
    rows = [[f"distinct {n}-grams", *(share(text[kind]["distinct"][n]) for kind in kinds)] for n in orders]
    rows += [["repeated 4-grams", *(share(text[kind]["repetition"]) for kind in kinds)]]
    rows += [[f"unseen {n}-grams", *(share(text[kind]["unseen"][n]) for kind in kinds)] for n in orders]
    tokens = min(found["tokens"] for found in text.values())
    return ReportTable(caption=f"{what}, in {tokens:,} tokens of each", columns=("share of", *kinds), rows=rows)


def nearer(found: dict[str, Any], kinds: Sequence[str], base: str) -> ReportTable:
    """Return how much nearer to human text each model writes than the base, statistic by statistic."""
    rows = [[title, *(_points(found[kind][name]) for kind in kinds)] for name, title in _STATISTICS.items()]
    return ReportTable(
        caption=f"Nearer to human text than {base}, in percentage points; the text is further away where it is below 0",
        columns=("share of", *kinds),
        rows=rows,
    )


def distances(found: dict[str, Any], names: Sequence[str], base: str) -> ReportTable:
    """Return how far each model's texts are from human ones in the states of the base's network."""
    rows = [[name, _distance(found[name]["distance"]), _distance(found[name]["nearer"])] for name in names]
    rows[0][2] = DASH  # the base itself
    return ReportTable(
        caption="Kernel distance (MMD²) to human text, in hidden states of the base",
        columns=("texts of", "distance", f"nearer than {base}"),
        rows=rows,
    )


def _distance(cell: list[Any]) -> str:
    return f"{number(cell[0])} ({interval(cell[1:])})"


_STATISTICS = {
    **{f"distinct {n}": f"distinct {n}-grams" for n in (2, 3, 4)},
    "repetition": "repeated 4-grams",
    **{f"unseen {n}": f"unseen {n}-grams" for n in (2, 3, 4)},
}


def _points(cell: list[Any]) -> str:
    value, low, high = (100 * part if is_number(part) else None for part in cell)
    if value is None:
        return DASH
    ends = "" if low is None or high is None else f" ({low:.1f} to {high:.1f})"
    return f"{value:.1f}{ends}".replace("-", "−")
