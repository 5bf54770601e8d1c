"""The report of a run: one page that opens from disk, and its figures as files.

    RUN/evaluation/evaluation.json + RUN/*/stage.json  →  RUN/report.html, RUN/figures/*.svg, RUN/figures/*.png

Nothing is measured here: a number on the page is a number of those files. The same files give the same bytes.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freenergy.core.errors import UserError
from freenergy.core.files import write_text
from freenergy.core.progress import Progress
from freenergy.report.citations import cite
from freenergy.runs.run import Run

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["can_draw", "cite", "look", "page_templates", "write_report"]

PAGE, FIGURES = "report.html", "figures"
_HERE = Path(__file__).parent
# characters that turn the direction of all that follows, so that a text of a corpus could rewrite the page around it
_TURNS = {ord(each): f"[U+{ord(each):04X}]" for each in "\u202a\u202b\u202d\u202e\u2066\u2067\u2068"}


def can_draw() -> bool:
    """Whether the packages of the extra ``report`` are installed."""
    return all(find_spec(name) is not None for name in ("matplotlib", "jinja2"))


def look() -> str:
    """Return the style sheet that the report shares with the playground and the study."""
    return (_HERE / "look.css").read_text(encoding="utf-8")


def page_templates(folder: Path = _HERE) -> "Environment":
    """Return the environment of a folder: with the style sheet ``css`` and the filter ``tight``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # optional
    from markupsafe import Markup

    files = FileSystemLoader(folder)
    found = Environment(loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.finalize = lambda value: value.translate(_TURNS) if type(value) is str and not value.isascii() else value
    found.globals["css"] = Markup(look() + (_HERE / "report.css").read_text(encoding="utf-8"))
    # no line break between a number and its %
    found.filters["tight"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    return found


def write_report(run: Run[Any], progress: Progress) -> Path:
    """Draw the figures of a finished run and write its page; returns the page's path."""
    try:
        if getattr(run.recipe, "family", "") == "tagging":
            from freenergy.report.tagging import write_tagging_report

            written: Path = write_tagging_report(run, progress)
            return written
        if getattr(run.recipe, "family", "") == "random-field":
            from freenergy.report.field_page import write_field_report

            return write_field_report(run, progress, run.folder / PAGE, run.folder / FIGURES)
        from freenergy.report.figures import draw
        from freenergy.report.learning_curve import draw_learning_curve
        from freenergy.report.page import page, read_evaluation
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: install it with pip install 'freenergy[report]'") from None

    evaluation = read_evaluation(run)
    drawings = [*draw(evaluation), *draw_learning_curve(run)]
    with progress.track("report", len(drawings) + 1, "files") as advance:
        for drawing in drawings:
            drawing.save(run.folder / FIGURES)
            advance(1)
        write_text(run.folder / PAGE, page(run, evaluation, drawings))
        advance(1)
    return run.folder / PAGE
