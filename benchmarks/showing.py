"""Results as Markdown tables and as one figure: the cost of a candidate against n, prefix length and vocabulary."""

import os

from comparing import AT_LEAST, AT_MOST

from freenergy.core.files import write_text

COLUMNS = "| case | way | ratio (smallest – largest) | tokens/s | of the GEMM peak | MB | s | error | promised |"
ALT = "Cost of a candidate against n, prefix length and vocabulary"
MARKS = ("<!-- written by make bench -->", "<!-- end -->")
# Okabe and Ito, as in the reports; each line has its own marker and dashes too
STYLES = {
    "generate": ("#D55E00", "-.", "s"),
    "expanded cache": ("#E69F00", ":", "^"),
    "ours": ("#009E73", "-", "o"),
    "ours, fused": ("#0072B2", "--", "D"),
}
LABELS = {
    "candidates": "candidates n",
    "prefix length": "tokens of the prefix",
    "vocabulary": "tokens in the vocabulary",
}
INK = "#2b2f36"
LOOK = {
    "svg.fonttype": "none", "svg.hashsalt": "cost", "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.15, "legend.frameon": False,
}  # fmt: skip


def cells(row):
    """A line of the table."""
    ratio = f"{row['ratio']:.2f}× ({row['smallest']:.2f} – {row['largest']:.2f})" if "ratio" in row else ""
    share = f"{row['share']:.0%}".replace("%", " %") if "share" in row else ""
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    numbers = [f"{row[key]:.3g}" if key in row else "" for key in ("seconds", "error")]
    megabytes = f"{row['megabytes']:,.0f}" if "megabytes" in row else ""
    found = [row["case"], row["way"], ratio, speed, share, megabytes, *numbers, promises(row)]
    return f"| {' | '.join(found)} |"


def promises(row):
    words = {"ratio": "{:.3g}×", "share": "{:.0%} of peak", "seconds": "{:.3g} s", "megabytes": "{:,.0f} MB"}
    found = [f"≥ {words[what].format(row[name])}" for name, what in AT_LEAST.items() if name in row]
    found += [f"≤ {words[what].format(row[name])}" for name, what in AT_MOST.items() if name in row]
    return ", ".join(found).replace("%", " %")


def tables(results):
    """Markdown of whole result files, by name."""
    lines = ["# Results of `make bench`", ""]
    lines += ["Ratios are medians over interleaved rounds in one process, beside the first way of the case unless the"]
    lines += ["case says otherwise; more is better. How they are taken and what they mean: docs/performance.md.", ""]
    for name, result in results.items():
        lines += [f"## {name}", "", f"{result['threads']} threads, at most {result['rounds']} rounds.", ""]
        lines += [COLUMNS, "|---|---|---|---|---|---|---|---|---|", *map(cells, result["rows"]), ""]
    if any("curve" in row for result in results.values() for row in result["rows"]):
        lines += [f"![{ALT}](results/cost.svg)", ""]
    return "\n".join(lines[:-1]) + "\n"


def put_into(page, results, figure):
    """Write what was promised and what was found, and the figure where there is one, between the marks of a page."""
    rows = [row for result in results.values() for row in result["rows"] if promises(row)]
    lines = [COLUMNS, "|---|---|---|---|---|---|---|---|---|", *map(cells, rows)]
    if figure.is_file():
        lines += ["", f"![{ALT}]({os.path.relpath(figure, page.parent)})"]
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    write_text(page, "\n".join([before + MARKS[0], *lines, MARKS[1] + after]))


def plot(rows, path):
    """Milliseconds a candidate; nothing where no row is of a curve or matplotlib is not there."""
    curves = [what for what in LABELS if any(row.get("curve") == what for row in rows)]
    if not curves:
        return
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return
    with rc_context(LOOK):
        figure = Figure(figsize=(4 * len(curves), 3.4), layout="constrained")
        for ax, what in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
            draw(ax, what, [row for row in rows if row.get("curve") == what])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    write_text(path, path.read_text().replace(INK, "currentColor"))


def draw(ax, what, rows):
    for way, (colour, dashes, marker) in STYLES.items():
        own = sorted((row["at"], row["milliseconds"]) for row in rows if row["way"] == way)
        if own:
            ax.plot(*zip(*own, strict=True), label=way, color=colour, linestyle=dashes, marker=marker, markersize=5)
    if what != "prefix length":  # which begins at nothing
        ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlabel=LABELS[what], ylabel="milliseconds a candidate")
    ax.legend()
