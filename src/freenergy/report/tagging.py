"""The page of a tagger: rates, confusions, the weights of pairs of tags, and probabilities over text.

Nothing is computed here: all numbers are those of ``evaluation.json``.
"""

from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from freenergy.core.files import read_json, write_text
from freenergy.core.progress import Progress
from freenergy.report import FIGURES, PAGE, page_templates
from freenergy.report.citations import cite
from freenergy.report.figures import STYLE, Drawing, rendered
from freenergy.report.page import to_toml
from freenergy.report.tables import stages, versions
from freenergy.report.tagging_tables import confusion_table, rate_table, sentence
from freenergy.runs.run import Run

_MOST_TAGS = 40  # of a matrix that can be read


def write_tagging_report(run: Run[Any], progress: Progress) -> Any:
    """Draw the figure of a finished run and write its page; returns the page's path."""
    records = {stage.name: run.finished(stage.name) for stage in run.recipe.stages()}
    found = read_json(run.stage("evaluation") / "evaluation.json")
    drawing = draw_transitions(found["transitions"])
    with progress.track("report", 2, "files") as advance:
        drawing.save(run.folder / FIGURES)
        advance(1)
        text = (
            page_templates()
            .get_template("tagging.html.j2")
            .render(
                name=run.recipe.name,
                about=run.recipe.about,
                summary=sentence(found),
                rates=rate_table(found),
                confusions=confusion_table(found),
                drawing=drawing,
                svg=Markup(drawing.inline()) if drawing.svg else "",
                examples=[example["words"] for example in found["examples"]],
                stages=stages(records),
                versions=versions(records),
                recipe=to_toml(run.recipe.to_json()),
                bibtex=cite(run).strip(),
            )
        )
        write_text(run.folder / PAGE, text)
        advance(1)
    return run.folder / PAGE


def draw_transitions(found: dict[str, Any] | None) -> Drawing:
    """Return the matrix of weights from tag to tag."""
    title = "Weights from tag to tag"
    if found is None:
        return Drawing(name="transitions", title=title, missing="This law of tags has no table of pairs of tags.")
    names, weights = found["tags"], found["weights"]
    if len(names) > _MOST_TAGS:
        return Drawing(name="transitions", title=title, missing=f"{len(names)} tags do not fit into a readable matrix.")
    largest = max(abs(value) for row in weights for value in row) or 1.0
    with rc_context(STYLE | {"axes.grid": False, "font.size": 8}):
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        axes = figure.subplots()
        shown = axes.imshow(weights, cmap="PuOr", vmin=-largest, vmax=largest)
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="this tag", ylabel="the tag before")
        figure.colorbar(shown, ax=axes, shrink=0.7, label="weight")
        pairs = [
            (value, a, b) for a, row in zip(names, weights, strict=True) for b, value in zip(names, row, strict=True)
        ]
        low, high = min(pairs), max(pairs)
        return rendered(
            "transitions",
            title,
            figure=figure,
            alt=f"The largest weight is {high[0]:.2f}, from {high[1]} to {high[2]}; the smallest {low[0]:.2f}, "
            f"from {low[1]} to {low[2]}.",
            caption="Weights that the model adds where one tag follows another; for a hidden Markov model these are "
            "log-probabilities.",
        )
