"""The page of a random field: tables, the length laws as a figure, sentences, settings and citations."""

from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_text
from freenergy.core.progress import Progress
from freenergy.recipes.stages.field_evaluation import STAGE, SUMMARY
from freenergy.report import field_tables, page_templates, tables
from freenergy.report.citations import cite, methods
from freenergy.report.figures import COLOURS, DASHES, STYLE, Drawing, rendered
from freenergy.report.page import commands, to_toml
from freenergy.runs.run import Run, is_current

_NAMES = {"human": "training text (π)", "base": "base", "joint": "field, one constant"}


def write_field_report(run: Run[Any], progress: Progress, page: Path, figures: Path) -> Path:
    """Draw the figure of a finished run and write its page."""
    run.finished("evaluation")
    if not is_current(STAGE, run):
        raise UserError(f"{run.folder} was evaluated with other settings or another version: run its recipe again")
    evaluation = read_json(run.stage("evaluation") / SUMMARY)
    with progress.track("report", 2, "files") as advance:
        drawing = draw_lengths(evaluation["lengths"]) if "lengths" in evaluation else None
        if drawing is not None:
            drawing.save(figures)
        advance(1)
        write_text(page, _html(run, evaluation, drawing))
        advance(1)
    return page


def _html(run: Run[Any], evaluation: dict[str, Any], drawing: Drawing | None) -> str:
    records = {stage.name: run.finished(stage.name) for stage in run.recipe.stages()}
    return (
        page_templates()
        .get_template("field.html.j2")
        .render(
            name=run.recipe.name,
            about=run.recipe.about,
            summary=field_tables.sentence(evaluation),
            verdict=evaluation.get("field", {}).get("verdict", ""),
            tables=[*field_tables.all_tables(evaluation), *field_tables.of_fit(records["field"]["summary"])],
            drawing=drawing,
            svg=Markup(drawing.inline()) if drawing else "",
            sentences=evaluation["sentences"],
            stages=tables.stages(records),
            versions=tables.versions(records),
            recipe=to_toml(run.recipe.to_json()),
            commands=commands(run.recipe),
            used=methods(run.recipe),
            bibtex=cite(run).strip(),
        )
    )


def draw_lengths(lengths: dict[str, list[float]]) -> Drawing:
    """Draw the law of sentence lengths in the training text, of the base and of the field."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for key, title in _NAMES.items():
            values = lengths[key]
            axes.plot(range(1, len(values) + 1), values, color=COLOURS[key], linestyle=DASHES[key], label=title)
        axes.set_xlabel("words of a sentence")
        axes.set_ylabel("probability")
        axes.legend()
    return rendered(
        "lengths",
        "Lengths of sentences",
        figure=figure,
        caption="With one constant a field has the lengths that its weights imply; with one per length it has π.",
        alt="Three curves of probability against the number of words: training text, base, and field.",
    )
