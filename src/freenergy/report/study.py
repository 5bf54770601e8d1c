"""The results of a human study: sentences and tables for the command line, and a page that opens from disk.

Every number is one of the study's ``summary.json``.
"""

from pathlib import Path
from typing import Any

from freenergy.core.files import write_text
from freenergy.core.format import DASH, interval, is_number, number, percent
from freenergy.report import page_templates
from freenergy.report.tables import ReportTable

STUDIES = "studies"  # folder of a run with the summaries of the human studies that it took part in
_LEVEL = 0.05
_TESTS = {
    "strict": ("A < B", "as Table 2 of Deng et al.: ties count against B"),
    "not_worse": ("A ≤ B", "as Table 2: ties count for B, so it can only show that B is not worse"),
    "decided": ("A < B, ties left out", "the sign test on decided pairs"),
}


def simulated(summary: dict[str, Any]) -> str:
    """Return a label if some raters are simulated, else an empty string."""
    found = summary["raters"]
    if not found["simulated"]:
        return ""
    return (
        f"{found['simulated']} of {found['invited']} raters are simulated: artificial raters with seeded random "
        "answers. These numbers test the statistics and say nothing about the texts."
    )


def sentence(summary: dict[str, Any]) -> str:
    """Return the result in a sentence or two."""
    test, all_pairs = summary["tests"]["decided"], summary["pairs"]["with_votes"]
    a, b = (summary["models"][model]["name"] for model in ("a", "b"))
    if not test["n"]:
        return "No pair is decided yet."
    shares = {name: percent(count / all_pairs) for name, count in summary["outcomes"].items()}
    text = f"Of {all_pairs} pairs raters preferred {b} in {shares['b']} and {a} in {shares['a']}"
    if summary["outcomes"]["ties"]:
        text += f"; {shares['ties']} are ties. Without ties {b} has {percent(test['rate'])}"
    chance = f"95 % interval {_interval(test['interval'])}; one-sided binomial test, p = {probability(test['p_value'])}"
    verdict = "" if test["p_value"] <= _LEVEL else ", which can be chance"
    return f"{text} ({chance}){verdict}."


def preference(summary: dict[str, Any]) -> ReportTable:
    """Return the rates of Table 2, in the three ways to count ties."""
    rows = []
    for name, (rate, meaning) in _TESTS.items():
        test = summary["tests"][name]
        numbers = [percent(test["rate"]), _interval(test["interval"]), probability(test["p_value"])]
        rows.append([rate, f"{test['k']} of {test['n']}", *numbers, meaning])
    columns = ("rate", "pairs", "for B", "95 % interval", "p, one-sided", "ties")
    return ReportTable(caption="Is B preferred?", columns=columns, rows=rows, is_prose=True)


def votes(summary: dict[str, Any]) -> ReportTable:
    """Return counted and dropped votes, and the agreement."""
    pairs, given, outcomes = summary["pairs"], summary["votes"], summary["outcomes"]
    checks, agree = summary["attention"], summary["agreement"]
    alpha = f"{number(agree['alpha'])} ({interval(agree['interval'])})"
    rows = [
        ["pairs", f"{pairs['asked']:,}", f"{pairs['with_votes']} with votes, {pairs['complete']} with all "
         f"{summary['settings']['votes']} requested; {pairs['same']} more have identical texts and were not shown"],
        ["pairs for A, for B, ties", f"{outcomes['a']}, {outcomes['b']}, {outcomes['ties']}", "by more votes"],
        ["votes on pairs", f"{given['given']:,}", f"{given['kept']} counted"],
        ["votes dropped", f"{given['dropped']:,}", "on pages with a failed attention check"],
        ["attention checks failed", f"{checks['failed']} of {checks['asked']}", "one on every page"],
        ["agreeing pairs of votes", percent(agree["share"]), f"on {agree['units']} pairs with two votes or more"],
        ["Krippendorff's α", alpha, "1 is agreement, 0 is chance; 95 % bootstrap interval over pairs"],
        ["seconds per page", number(summary["seconds_a_page"]), "median, from first display to answer"],
    ]  # fmt: skip
    return ReportTable(caption="Votes and agreement", columns=("what", "value", "meaning"), rows=rows, is_prose=True)


def raters(summary: dict[str, Any]) -> ReportTable:
    """Return one row per rater."""
    rows = []
    for rater in summary["by_rater"]:
        right = rater["qualification"]
        known = {True: "yes", False: "no", None: DASH}[rater["is_qualified"]]
        counts = [str(rater[name]) for name in ("pages", "votes", "dropped", "checks_failed", "for_b")]
        first = percent(rater["text_1"] / rater["votes"]) if rater["votes"] else DASH
        questions = f"{right['right']} of {right['given']}"
        rows.append([rater["label"], questions, known, *counts, first, number(rater["seconds_a_page"])])
    columns = ("rater", "questions right", "qualified", "pages", "votes", "dropped", "checks failed", "counted for B",
               "chose text 1", "seconds per page")  # fmt: skip
    return ReportTable(caption="Raters", columns=columns, rows=rows)


def probability(value: Any) -> str:
    """Format a p-value with two digits.

    >>> probability(0.00084), probability(0.52), probability(1e-12), probability(None)
    ('0.00084', '0.52', '1e-12', '–')
    """
    return f"{value:.2g}" if is_number(value) else DASH


def _interval(ends: Any) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %" if ends else DASH


def write_study_page(folder: Path, summary: dict[str, Any]) -> Path:
    """Write STUDY/report.html and return its path."""
    write_text(folder / "report.html", study_page(summary))
    return folder / "report.html"


def study_page(summary: dict[str, Any]) -> str:
    """Return the HTML of a study's report."""
    page = page_templates().get_template("study.html.j2")
    return page.render(
        name=summary["study"],
        a=summary["models"]["a"]["name"],
        b=summary["models"]["b"]["name"],
        simulated=simulated(summary),
        sentence=sentence(summary),
        bar=_bar(summary["outcomes"]),
        tables=tables(summary),
        examples=summary["examples"],
    )


def tables(summary: dict[str, Any]) -> list[ReportTable]:
    """Return all tables, for the page and the command line."""
    return [preference(summary), votes(summary), raters(summary)]


def _bar(outcomes: dict[str, int]) -> list[dict[str, Any]]:
    """Return the parts of a bar of 100: offset and width of A, ties and B."""
    total, x, parts = sum(outcomes.values()), 0.0, []
    for name, words in (("a", "for A"), ("ties", "ties"), ("b", "for B")):
        if outcomes[name]:
            width = 100 * outcomes[name] / total
            parts.append({"name": name, "words": words, "count": outcomes[name], "x": x, "width": width})
            x += width
    return parts
