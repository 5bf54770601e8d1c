"""Draws the four figures of a report from ``evaluation.json``.

    by_position → Fig. 1 of Deng et al. (2020)      draws_curve, text → Fig. 2      densities → Fig. 3

Colours are of Okabe and Ito, which colour-blind readers tell apart, and each line has its own dashes or marker too. In
the SVG ink is ``currentColor`` and the three colours are CSS variables, so that a figure suits a light page and a dark.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy.stats import gaussian_kde

from freenergy.core.files import atomic_write, write_text
from freenergy.core.format import interval, is_number, number
from freenergy.evaluation.black_box import has_perplexity

COLOURS = {"human": "#009E73", "base": "#D55E00", "joint": "#0072B2"}
DASHES = {"human": "-", "base": "-.", "joint": "--"}
MARKERS = {"human": "o", "base": "s", "joint": "D"}
NAMES = {"human": "human text", "base": "base", "joint": "residual"}
_INK = "#2b2f36"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 11, "text.color": _INK, "axes.edgecolor": _INK,
    "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": _INK, "grid.alpha": 0.15, "axes.axisbelow": True,
    "legend.frameon": False, "legend.handlelength": 2.6, "lines.linewidth": 1.9, "lines.markersize": 6,
    "axes.formatter.useoffset": False,
}  # fmt: skip
# dates and versions would change the bytes
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
# for an SVG opened by itself; in the page the style sheet says the same
_ALONE = (
    "svg{color:#2b2f36}@media(prefers-color-scheme:dark)"
    "{svg{color:#d9dde3;--human:#2cc49a;--base:#f0843a;--joint:#6cb8ec}}"
)
_DPI = 160


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure with its caption; without data only a sentence that says how to get them."""

    name: str
    title: str
    caption: str = ""
    alt: str = ""
    missing: str = ""
    svg: str = ""
    png: bytes = b""

    def save(self, folder: Path) -> None:
        """Write NAME.svg and NAME.png, or remove those of earlier data."""
        if not self.svg:
            for ending in ("svg", "png"):
                (folder / f"{self.name}.{ending}").unlink(missing_ok=True)
            return
        alone = re.sub(r"(<svg[^>]*>)", rf"\1<style>{_ALONE}</style>", self.svg, count=1)
        write_text(folder / f"{self.name}.svg", alone)
        with atomic_write(folder / f"{self.name}.png") as temporary:
            temporary.write_bytes(self.png)

    def inline(self) -> str:
        """Return the SVG for a page that contains other figures too."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg))
        # ids are counted from one in every figure, and a page has four
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-labelledby="{self.name}-title {self.name}-alt"', 1)


def rendered(
    name: str, title: str, *, figure: Figure | None = None, caption: str = "", alt: str = "", missing: str = ""
) -> Drawing:
    """Render a figure to SVG and PNG; equal data give equal bytes."""
    if figure is None:
        return Drawing(name=name, title=title, missing=missing)
    svg, png = StringIO(), BytesIO()
    with rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata=_NO_METADATA)
        figure.savefig(png, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    text = svg.getvalue().replace(_INK, "currentColor")
    for kind, colour in COLOURS.items():
        text = text.replace(colour.lower(), f"var(--{kind}, {colour})")
    return Drawing(name=name, title=title, caption=caption, alt=alt, svg=text, png=png.getvalue())


def draw(evaluation: dict[str, Any]) -> list[Drawing]:
    """Return all four, each from its part of the evaluation."""
    if "joint" not in evaluation:
        because = "It needs a residual model: add an [energy] section to the recipe and run it again."
        return [Drawing(name=name, title=title, missing=because) for name, (title, _) in _FIGURES.items()]
    with rc_context(STYLE):
        return [make(evaluation, partial(rendered, name, title)) for name, (title, make) in _FIGURES.items()]


def _positions(evaluation: dict[str, Any], drawing: Callable[..., Drawing]) -> Drawing:
    rows = [row for row in evaluation.get("by_position") or [] if is_number(row["gain_percent"])]
    if not rows:
        return drawing(missing="Not measured: set evaluation.position_windows to 1 or more, and run it again.")
    figure, (ax,) = canvas(1, 3.6)
    x, gain = [row["position"] for row in rows], [row["gain_percent"] for row in rows]
    sure = [row for row in rows if row["interval"] and all(map(is_number, row["interval"]))]
    low, high = ([row["interval"][end] for row in sure] for end in (0, 1))
    ax.fill_between([row["position"] for row in sure], low, high, color=COLOURS["joint"], alpha=0.2, linewidth=0)
    ax.plot(x, gain, color=COLOURS["joint"], marker=MARKERS["joint"], markersize=4)
    ax.axhline(0, color=_INK, linewidth=1)
    # with few windows the interval at some position may be huge: it must not flatten the rest
    bottom, top = min(0, *gain), max(0, *gain)
    span = top - bottom or 1
    ax.set_ylim(max(min([bottom, *low]), bottom - span) - 0.05 * span, min(max([top, *high]), top + span) + 0.05 * span)
    ax.set(xlabel="position in the continuation", ylabel="less perplexity than the base (%)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    best = max(rows, key=lambda row: row["gain_percent"])
    return drawing(
        figure=figure,
        alt=f"Gain from {number(gain[0])} % at position {x[0]} to {number(gain[-1])} % at position {x[-1]}, "
        f"largest at position {best['position']}: {number(best['gain_percent'])} %.",
        caption="How much lower the residual model's perplexity of each token is than the base's, by the token's place "
        "in the continuation. Each step's probability is estimated from completions drawn from the base; the band is "
        "the 95 % interval over documents, clipped to the figure. Above zero the residual model predicts better.",
    )


def _draws(evaluation: dict[str, Any], drawing: Callable[..., Drawing]) -> Drawing:
    rows = evaluation.get("draws_curve") or []
    if len(rows) < 2:
        return drawing(missing="Not measured: set evaluation.candidates to 5 or more, and run it again.")
    if not has_perplexity(evaluation):
        return _nats(rows)
    figure, (ax,) = canvas(1, 3.9)
    lines = {
        "base": dict(label="base", color=COLOURS["base"], linestyle=DASHES["base"]),
        "upper": dict(label="residual, upper estimate", color=COLOURS["joint"], linestyle=":", marker="^"),
        "certified": dict(label="residual, certified", color=COLOURS["joint"], linestyle="-", marker=MARKERS["joint"]),
        "lower": dict(label="residual, lower estimate", color=COLOURS["joint"], linestyle="--", marker="v"),
    }
    n = [row["draws"] for row in rows]
    for key, style in lines.items():
        ax.plot(n, [row[key] if is_number(row[key]) else np.nan for row in rows], **style)  # type: ignore[arg-type]
    ax.set_xscale("log", base=2)
    ax.set_xticks(n, [f"{m:,}" for m in n], rotation=45 if len(n) > 9 else 0)
    ax.minorticks_off()
    # with two or four draws the upper estimate may be huge: it must not flatten the rest
    shown = [row[key] for row in rows for key in ("base", "certified", "lower") if is_number(row[key])]
    shown += [rows[-1]["upper"]] if is_number(rows[-1]["upper"]) else []
    margin = 0.08 * (max(shown) - min(shown)) or 0.1
    ax.set_ylim(min(shown) - margin, max(shown) + 3 * margin)
    ax.set(xlabel="draws from the base for each prefix", ylabel="perplexity per token")
    ax.legend()
    last = rows[-1]
    return drawing(
        figure=figure,
        alt=f"With {last['draws']} draws: base {number(last['base'])}, residual certified {number(last['certified'])}, "
        f"lower {number(last['lower'])}, upper {number(last['upper'])}.",
        caption="Perplexity of the residual model against the number of draws that log Z is estimated from. The "
        "certified line is in expectation above the perplexity of what resampling with that many candidates writes; "
        "where the two estimates meet, more draws change nothing. Subsets of the same stored draws, averaged.",
    )


def _nats(rows: list[dict[str, Any]]) -> Drawing:
    """Draw what is certified over a base that only samples."""
    figure, (ax,) = canvas(1, 3.6)
    n = [row["draws"] + 1 for row in rows]
    ax.plot(n, np.log(n), color=_INK, linestyle=":", label="log n, the most per text or chunk")
    ax.plot(n, [row["certified"] for row in rows], color=COLOURS["joint"], marker=MARKERS["joint"], label="certified")
    ax.set_xscale("log", base=2)
    ax.set_xticks(n, [f"{m:,}" for m in n], rotation=45 if len(n) > 9 else 0)
    ax.minorticks_off()
    ax.set(xlabel="n, candidates for each prefix", ylabel="nats per text")
    ax.legend()
    return rendered(
        "draws",
        "Certified nats against candidates",
        figure=figure,
        alt=f"With {n[-1]} candidates {number(rows[-1]['certified'])} nats per text are certified.",
        caption="What resampling with n candidates is certain to gain over a base that only samples, in nats per text "
        "(perplexity is not claimed). Subsets of the same stored draws, averaged.",
    )


def _distinct(evaluation: dict[str, Any], drawing: Callable[..., Drawing]) -> Drawing:
    text = {name: evaluation["text"][name] for name in NAMES if name in (evaluation.get("text") or {})}
    if not text:
        return drawing(missing="Not measured: the evaluation has no statistics of text; run it again.")
    # continuations of fewer than n tokens have no n-grams
    orders = [n for n in (2, 3, 4) if all(is_number(found["distinct"][str(n)][0]) for found in text.values())]
    if not orders:
        return drawing(missing="Not measured: set corpus.continuation to 2 or more, and run it again.")
    figure, (ax,) = canvas(1, 3.6)
    for i, (name, found) in enumerate(text.items()):
        values = np.array([found["distinct"][str(n)] for n in orders], dtype=float)  # share, low, high; None is NaN
        reach = np.abs(values[:, 1:] - values[:, :1]).T
        at = np.array(orders) + 0.13 * (i - (len(text) - 1) / 2)
        style = dict(color=COLOURS[name], marker=MARKERS[name], label=NAMES[name], linestyle="none", capsize=4)
        ax.errorbar(at, values[:, 0], yerr=np.nan_to_num(reach), **style)  # type: ignore[arg-type]
    ax.set_xticks(orders, [f"{n}-grams" for n in orders])
    ax.set_xlim(1.5, 4.5)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    ax.set_ylabel("share that is distinct")
    ax.legend(loc="lower right")
    longest = orders[-1]
    shares = [f"{NAMES[name]} {number(100 * found['distinct'][str(longest)][0])} %" for name, found in text.items()]
    tokens = min(found["tokens"] for found in text.values())
    return drawing(
        figure=figure,
        alt=f"Share of distinct {longest}-grams: {', '.join(shares)}.",
        caption=f"How varied the texts are: different n-grams as a share of all, in {tokens:,} tokens of each. A model "
        "that repeats itself lies below human text. Bars are 95 % intervals over documents.",
    )


def _densities(evaluation: dict[str, Any], drawing: Callable[..., Drawing]) -> Drawing:
    found = evaluation.get("densities") or {}
    if not found:
        because = "run it again" if has_perplexity(evaluation) else "its base only samples"
        return drawing(missing=f"Not measured: the evaluation has no log-probabilities of texts; {because}.")
    figure, axes = canvas(2, 6.0)
    for ax, model in zip(axes, ("base", "joint"), strict=True):
        for name in NAMES:
            if found[model].get(name):
                _density(ax, found[model][name], name)
        ax.set_title(f"under the {model} model", loc="left", fontsize=11)
        ax.set(ylabel="density", yticks=[], ylim=(0, None))
    axes[-1].set_xlabel("log-probability per token (nats)")
    axes[0].legend()
    apart = _apart(found.get("difference_of_means") or {})
    return drawing(
        figure=figure,
        alt=f"Densities of three kinds of text under two models. {apart}",
        caption="How likely real text, the base's text and the residual model's text are to each model: "
        "log-probability per token of whole continuations (kernel estimate; the ticks below are the means). A model "
        f"whose own text is likelier to it than real text has learned too narrow a law. {apart}".strip(),
    )


def _density(ax: Axes, values: Sequence[Any], name: str) -> None:
    """Plot a kernel density estimate, or ticks if the values are too few or all equal."""
    x = np.array([value for value in values if is_number(value)], dtype=float)
    style: dict[str, Any] = dict(color=COLOURS[name], linestyle=DASHES[name], label=NAMES[name])
    if len(x) < 3 or np.ptp(x) == 0:
        ax.plot(x, np.zeros_like(x), "|", color=COLOURS[name], label=NAMES[name], markersize=24)
        return
    estimate = gaussian_kde(x)
    reach = 3 * x.std(ddof=1) * estimate.factor
    grid = np.linspace(x.min() - reach, x.max() + reach, 240)
    ax.plot(grid, estimate(grid), **style)
    ax.fill_between(grid, estimate(grid), color=COLOURS[name], alpha=0.1, linewidth=0)
    ax.axvline(x.mean(), ymax=0.06, color=COLOURS[name], linewidth=3)


def _apart(differences: dict[str, Any]) -> str:
    parts = []
    for model in ("base", "joint"):
        by_text = differences.get(model)
        if isinstance(by_text, dict) and by_text.get(model) and is_number(by_text[model][0]):
            value, low, high = by_text[model]
            parts.append(f"{number(value)} nats under the {model} ({interval([low, high])})")
    return f"Mean of human text minus mean of the model's own: {', '.join(parts)}." if parts else ""


def canvas(panels: int, height: float, *, sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels one above the other."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    return figure, list(figure.subplots(panels, 1, sharex=sharex, squeeze=False)[:, 0])


_FIGURES: dict[str, tuple[str, Callable[[dict[str, Any], Callable[..., Drawing]], Drawing]]] = {
    "positions": ("Gain by position", _positions),
    "draws": ("Perplexity against draws", _draws),
    "distinct": ("Distinct n-grams", _distinct),
    "densities": ("Log-probability of texts", _densities),
}
