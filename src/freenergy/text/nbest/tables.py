"""What ``rank_file`` has found, as tables of words: title, columns, rows."""

from typing import Any, NamedTuple

_SYSTEMS = {
    "first": "the first candidate, as given",
    "base": "base: log P_LM",
    "joint": "residual model: log P_LM − E",
    "weighted": "weighted sum of all scores",
    "tuned": "tuned sum of all scores",
    "oracle": "oracle: the best of each list",
}


class Table(NamedTuple):
    """For a person to read."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(found: dict[str, Any]) -> list[Table]:
    """Weights, error rates and comparisons; of each what there is."""
    rows = [[name, f"{weight:.4g}"] for name, weight in found["weights"].items()]
    shown, tuned = [Table("Weights", ["score", "weight"], rows)], found["tuned"]
    if tuned is not None:
        rows = [[tuned["file"], f"{tuned['lists']:,}", *(f"{100 * tuned[key]:.2f}" for key in ("before", "after"))]]
        shown.append(Table("Errors in 100 on the lists tuned on", ["file", "lists", "before", "after"], rows))
    if found["errors"] is None:
        return shown
    errors = found["errors"]
    rows = [[_SYSTEMS[name], *_percents(rate)] for name, rate in errors["rates"].items()]
    title = f"Errors in 100 {errors['unit']}s ({errors['lists']:,} lists, {errors['documents']:,} documents)"
    shown.append(Table(title, ["chosen by", "errors", "95 % interval"], rows))
    rows = [
        [f"{row['system']} against {row['against']}", *_percents(row["difference"]), _p(row["p_value"])]
        for row in errors["comparisons"]
    ]
    shown.append(Table("Fewer (−) or more errors, paired", ["", "errors", "95 % interval", "p"], rows))
    return shown


def _percents(measured: list[float | None]) -> list[str]:
    value, low, high = (None if number is None else f"{100 * number:.2f}" for number in measured)
    return [value or "–", "–" if low is None else f"{low} – {high}"]


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"
