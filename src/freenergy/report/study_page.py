"""The page of a human study: which model was preferred, by how much, whether that is chance, and how well raters agree.

Every number is one of the study's ``summary.json``; the page opens from disk, fetches nothing and runs nothing.
"""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from freenergy.core.files import write_text
from freenergy.report import look
from freenergy.report.study_tables import preference, raters, sentence, simulated, votes
from freenergy.report.templates import templates


def write_study_page(folder: Path, summary: dict[str, Any]) -> Path:
    """Write STUDY/report.html and return its path."""
    write_text(folder / "report.html", study_page(summary))
    return folder / "report.html"


def study_page(summary: dict[str, Any]) -> str:
    """Return the HTML of a study's report."""
    return (
        templates()
        .get_template("study.html.j2")
        .render(
            css=Markup(look()),
            name=summary["study"],
            a=summary["models"]["a"]["name"],
            b=summary["models"]["b"]["name"],
            simulated=simulated(summary),
            sentence=sentence(summary),
            bar=bar(summary["outcomes"]),
            tables=[preference(summary), votes(summary), raters(summary)],
            examples=summary["examples"],
        )
    )


def bar(outcomes: dict[str, int]) -> list[dict[str, Any]]:
    """Return the parts of a bar of 100: offset and width of A, ties and B."""
    total, x, parts = sum(outcomes.values()), 0.0, []
    for name, words in (("a", "for A"), ("ties", "ties"), ("b", "for B")):
        if outcomes[name]:
            width = 100 * outcomes[name] / total
            parts.append({"name": name, "words": words, "count": outcomes[name], "x": x, "width": width})
            x += width
    return parts
