"""Draws how the certified gain grows with the training windows, from the record of the energy stage.

gain on validation windows against the windows that the energy was fitted to; hollow: the next doubling, extrapolated
"""

from typing import Any

from matplotlib import rc_context

from freenergy.core.format import is_number, learning_sentence
from freenergy.report.figures import COLOURS, MARKERS, STYLE, Drawing, canvas, rendered
from freenergy.runs.run import Run


def draw_learning_curve(run: Run[Any]) -> list[Drawing]:
    """Return the figure, where the run has measured a learning curve."""
    if "energy" not in [stage.name for stage in run.recipe.stages()]:
        return []
    curve = run.finished("energy")["summary"].get("learning_curve")
    return [_drawn(curve)] if curve else []


def _drawn(curve: dict[str, Any]) -> Drawing:
    rows, colour, marker = curve["rows"], COLOURS["joint"], MARKERS["joint"]
    windows, gains = [row["windows"] for row in rows], [row["gain"] for row in rows]
    errors = [1.96 * row["error"] if is_number(row["error"]) else 0.0 for row in rows]
    ticks = list(windows)
    with rc_context(STYLE):
        figure, (ax,) = canvas(1, 3.6)
        ax.errorbar(windows, gains, yerr=errors, color=colour, marker=marker, capsize=4, label="measured")
        if is_number(curve["next_doubling"]):
            ticks.append(2 * windows[-1])
            ahead = [gains[-1], gains[-1] + curve["next_doubling"]]
            style: dict[str, Any] = dict(linestyle=":", marker=marker, markerfacecolor="none", label="extrapolated")
            ax.plot(ticks[-2:], ahead, color=colour, **style)
            ax.legend()
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{m:,}" for m in ticks])
        ax.minorticks_off()
        ax.set(xlabel="training windows", ylabel="certified gain (nats per sequence)")
        words = _capital(learning_sentence(curve))
        return rendered(
            "learning",
            "Gain against training windows",
            figure=figure,
            alt=f"{words}.",
            caption="Would more windows help? Linear energies fitted to a quarter, a half and all of the windows, with "
            f"{curve['negatives']} negatives each, and measured on validation windows with {curve['candidates']} "
            "candidates; bars are 95 % intervals over windows. These windows also choose the penalty, so the gain is "
            f"slightly flattered. {words}.",
        )


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
