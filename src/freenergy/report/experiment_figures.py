"""The figures of an experiment: curves of training, the study, sheets of images.

losses    cross-entropy by epoch, in training and on validation data: Fig. 1 of Wang et al. (2022)
study     the main number against E-ARM's start epoch and against its weight: their Table 4, with intervals
sheets    images that the networks have drawn: columns × rows of them, a line of paper between them
"""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.image import imsave

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, read_arrays
from freenergy.core.format import number
from freenergy.report.figures import COLOURS, STYLE, Drawing, canvas, rendered
from freenergy.training.loop import read_records

FIGURES = "figures"
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_POINTS = 60  # per training curve
_PAPER = 128  # grey, so that black and white images both have an edge
_GAP = 1
_NO_METADATA: Any = {"Software": None}  # a version would change the bytes
Curve = tuple[Sequence[float], Sequence[float]]


def draw_experiment(folder: Path, table: dict[str, Any]) -> list[Path]:
    """Draw the figures of a finished experiment; returns the files."""
    drawings = []
    for variant in dict.fromkeys(row["variant"] for row in table["rows"]):
        rows = [row for row in table["rows"] if row["variant"] == variant]
        ending = f"-{'-'.join(variant.lower().split())}" if variant else ""
        if all(each["epoch_steps"] for each in rows):  # else its rows have not one training each
            drawings.append(losses(folder, rows, ending))
        if any({"start_epoch", "weight"} <= set(row["point"]) for row in rows):
            drawings.append(study(rows, table["main_column"], ending))
    for drawing in drawings:
        drawing.save(folder / FIGURES)
    return [*(folder / FIGURES / f"{drawing.name}.svg" for drawing in drawings), *_sheets(folder, table)]


@rc_context(STYLE)
def losses(folder: Path, rows: Sequence[dict[str, Any]], ending: str = "") -> Drawing:
    """Cross-entropy by epoch: the base, and rows with E-ARM next to their controls; means over seeds."""
    figure, axes = canvas(2, 6.4)
    shown = [row for row in rows if row["kind"] in ("base", "control") or row["control"]]
    styles = cycle(_DASHES)
    for row in shown:
        colour = COLOURS[{"base": "base", "control": "human"}.get(row["kind"], "joint")]
        dashes = "-" if row["kind"] == "base" else next(styles)
        start = 0.0 if row["scratch"] else rows[0]["epochs"][0]  # a row that continues the base starts where it ends
        for ax, curve in zip(axes, curves(folder, row), strict=True):
            x, y = curve
            ax.plot([start + epoch for epoch in x], y, color=colour, linestyle=dashes, label=row["name"])
    for ax, title in zip(axes, ("training", "validation"), strict=True):
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_ylabel("cross-entropy (nats per token)")
    axes[-1].set_xlabel("epoch")
    axes[0].legend(fontsize=8)
    last = ", ".join(f"{row['name']} {number(row['validation']['mean'])}" for row in shown)
    return rendered(
        f"losses{ending}",
        "Cross-entropy by epoch",
        figure=figure,
        alt=f"Curves of training and validation. Best validation: {last}.",
        caption="Cross-entropy of training and validation data by epoch, means over seeds. A row that continues starts "
        "where the base ends; its control has the same compute without E-ARM.",
    )


def curves(folder: Path, row: dict[str, Any]) -> tuple[Curve, Curve]:
    """Training and validation by epoch, means over seeds up to the epoch that all have reached."""
    seeds = [read_records(folder / each / "base" / "training") for each in row["folders"]]
    epoch = row["epoch_steps"]
    steps = min(len(records) for records in seeds)
    # with E-ARM the loss is more than cross-entropy, which is then logged separately
    trained = np.mean(
        [[r["metrics"].get("cross_entropy", r["loss"]) for r in records[:steps]] for records in seeds], axis=0
    )
    parts = np.array_split(np.arange(steps), min(_POINTS, steps))
    training = [float(part.mean() + 1) / epoch for part in parts], [float(trained[part].mean()) for part in parts]
    # controls of other seeds may have ended at other steps
    held_out = {
        step: [records[step - 1]["validation"] for records in seeds]
        for step in range(1, steps + 1)
        if all(records[step - 1]["validation"] is not None for records in seeds)
    }
    return training, ([step / epoch for step in held_out], [float(np.mean(values)) for values in held_out.values()])


@rc_context(STYLE)
def study(rows: Sequence[dict[str, Any]], column: str, ending: str = "") -> Drawing:
    """Draw against start epoch, one line per weight; and against weight, one line per start epoch."""
    points = [row for row in rows if row["kind"] == "grid"]
    control = next((row for row in rows if row["name"] == points[0]["control"]), None)
    axes_of = [("start_epoch", "weight"), ("weight", "start_epoch")]
    figure, axes = canvas(2, 6.4, sharex=False)
    for ax, (across, line) in zip(axes, axes_of, strict=True):
        if control is not None:
            _band(ax, control["numbers"][column])
        styles = zip(cycle(_DASHES), cycle(_MARKERS))
        for value, (dashes, marker) in zip(sorted({row["point"][line] for row in points}), styles, strict=False):
            of_line = sorted(
                (row for row in points if row["point"][line] == value), key=lambda row: row["point"][across]
            )
            if len(of_line) > 1 or len(points) == 1:
                _line(ax, of_line, across, column, f"{_words(line)} {value:g}", dashes, marker)
        if across == "weight":
            ax.set_xscale("log")
        values = sorted({row["point"][across] for row in points})
        ax.set_xticks(values, [f"{value:g}" for value in values])
        ax.minorticks_off()
        ax.set(xlabel=_words(across), ylabel=column)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    values_of_rows = [f"{row['name']}: {number(row['numbers'][column]['mean'])}" for row in points]
    return rendered(
        f"study{ending}",
        f"{column} against start epoch and weight",
        figure=figure,
        alt=f"{column} of {'; '.join(values_of_rows)}.",
        caption=f"{column} by E-ARM's start epoch and weight; bars are 95 % t intervals over seeds. The band is the "
        "control: cross-entropy alone for the CPU seconds of the costliest row.",
    )


def _line(
    ax: Axes, rows: Sequence[dict[str, Any]], across: str, column: str, label: str, dashes: str, marker: str
) -> None:
    means = np.array([row["numbers"][column]["mean"] for row in rows], dtype=float)
    ends = np.array([row["numbers"][column]["interval"] for row in rows], dtype=float)  # None is NaN
    reach = np.nan_to_num(np.abs(ends - means[:, None])).T
    at = [row["point"][across] for row in rows]
    style: dict[str, Any] = dict(color=COLOURS["joint"], linestyle=dashes, marker=marker, label=label, capsize=3)
    ax.errorbar(at, means, yerr=reach, **style)


def _band(ax: Axes, found: dict[str, Any]) -> None:
    if found["mean"] is None:
        return
    ax.axhline(found["mean"], color=COLOURS["human"], linestyle="-", label="control")
    if found["interval"][0] is not None:
        ax.axhspan(*found["interval"], color=COLOURS["human"], alpha=0.15, linewidth=0)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _sheets(folder: Path, table: dict[str, Any]) -> list[Path]:
    """Return a sheet of each row that has drawn images, first seed."""
    made = []
    for row in table["rows"]:
        drawn = folder / row["folders"][0] / "measurement" / "samples.safetensors"
        if drawn.is_file():
            path = folder / FIGURES / f"{'-'.join(Path(row['folders'][0]).parts)}.png"
            draw_sheet(read_arrays(drawn)["samples"], path)
            made.append(path)
    return made


def draw_sheet(images: UInt8[np.ndarray, "n height width *colours"], path: Path, *, zoom: int = 3) -> None:
    """Write grey images [n, H, W] or [n, H, W, 1] or colour images [n, H, W, 3] as a PNG; a pixel is ``zoom`` wide."""
    if images.ndim == 3:
        images = images[..., None]
    n, height, width, colours = images.shape
    if not n or colours not in (1, 3):
        raise UserError(f"images of shape {images.shape} cannot be drawn: give one or more, grey or RGB")
    columns = math.ceil(math.sqrt(n))
    tall, wide = height + _GAP, width + _GAP
    sheet = np.full((math.ceil(n / columns) * tall + _GAP, columns * wide + _GAP, 3), _PAPER, dtype=np.uint8)
    for k, image in enumerate(images):
        top, left = _GAP + k // columns * tall, _GAP + k % columns * wide
        sheet[top : top + height, left : left + width] = image
    with atomic_write(path) as temporary:
        imsave(temporary, sheet.repeat(zoom, 0).repeat(zoom, 1), format="png", metadata=_NO_METADATA)
