"""The page: one file with tables, figures, examples, settings and citations; no network, no scripts.

Model output is shown as text: the templates escape everything but the SVGs that are drawn here.
"""

import inspect
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import quote as percent_encoded

from markupsafe import Markup

from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.format import DASH, gain, gain_interval, interval, is_number, number
from freenergy.evaluation.black_box import CLAIM, has_perplexity
from freenergy.evaluation.ladder import verdict
from freenergy.recipes.families.residual import ResidualRecipe
from freenergy.recipes.load import load_recipe, recipes
from freenergy.recipes.stages.evaluation import STAGE, SUMMARY, read_summary
from freenergy.report import look, tables
from freenergy.report.citations import cite, methods
from freenergy.report.figures import Drawing
from freenergy.report.study_tables import STUDIES, preference, sentence, simulated
from freenergy.report.templates import templates
from freenergy.report.toml import to_toml
from freenergy.runs.run import Recipe, Run, is_current

_HERE = Path(__file__).parent
PLAYGROUND = "http://127.0.0.1:8000/"  # the default address of `freenergy serve`
_KINDS = {"human": "human", "best": "lowest energy", "typical": "typical energy", "worst": "highest energy"}


def read_evaluation(run: Run[Any]) -> dict[str, Any]:
    """Return the evaluation of a run; raises ``UserError`` if there is none."""
    run.finished("evaluation")
    path = run.stage("evaluation") / SUMMARY
    if not is_current(STAGE, run):
        raise UserError(f"{run.folder} was evaluated with other settings or another version: run its recipe again")
    return read_summary(run, path.parent)


def page(run: Run[Any], evaluation: dict[str, Any], drawings: list[Drawing]) -> str:
    """Return the HTML of a run's report."""
    environment = templates()
    environment.filters["playground"] = _in_playground
    records = {stage.name: run.finished(stage.name) for stage in run.recipe.stages()}
    joint, text, rungs = evaluation.get("joint"), evaluation.get("text"), evaluation.get("ladder") or []
    return environment.get_template("report.html.j2").render(
        name=run.recipe.name,
        about=run.recipe.about,
        css=Markup(look() + (_HERE / "report.css").read_text(encoding="utf-8")),
        summary=summary(evaluation),
        verdicts=verdicts(evaluation),
        beaten=beaten(evaluation),
        joint=joint,
        is_black_box=not has_perplexity(evaluation),
        headline=tables.headline(evaluation),
        ladder=tables.rungs(rungs) if len(rungs) > 1 else None,
        which_paid=verdict(rungs),
        ranking=tables.ranking(evaluation["ranking"]) if evaluation.get("ranking") else None,
        diagnostics=tables.diagnostics(joint) if joint else None,
        text=tables.text_statistics(text) if text else None,
        written=_written(evaluation.get("written")),
        figures=[(drawing, Markup(drawing.inline()) if drawing.svg else "") for drawing in drawings],
        examples=[_example(example) for example in evaluation.get("examples") or []],
        samples=evaluation.get("samples") or [],
        studies=[_study(read_json(path)) for path in sorted((run.folder / STUDIES).glob("*.json"))],
        energies=energies(run.recipe),
        stages=tables.stages(records),
        versions=tables.versions(records),
        recipe=to_toml(run.recipe.to_json()),
        commands=commands(run.recipe),
        serve=f"freenergy serve {quote(_folder(run.recipe))}",
        used=methods(run.recipe),
        bibtex=cite(run).strip(),
    )


def _written(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the tables and texts of whole texts that the models have written."""
    if not found:
        return None
    names, what = found["names"], "Whole texts that the models have written"
    return {
        "statistics": tables.text_statistics(found["statistics"], names, what),
        "nearer": tables.nearer(found["nearer"], names[2:], names[1]),
        "texts": found["texts"],
        "names": names,
    }


def _in_playground(prefix: str) -> str:
    """Return the playground's URL with this prefix."""
    return f"{PLAYGROUND}#prefix={percent_encoded(prefix, safe='')}"


def summary(evaluation: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    joint, split = evaluation.get("joint"), evaluation["split"]
    if not joint:
        base = evaluation["base"]
        return (
            f"On {base['windows']:,} {split} windows the base's perplexity is {number(base['perplexity']['token'])} "
            f"per token (95 % interval {interval(base['interval']['token'])}); the run has no energy, so there is no "
            "residual model to measure."
        )
    if not has_perplexity(evaluation):
        return _nats(joint, split)
    percent, ends = joint["gain"]["percent"], joint["gain"]["interval"] or [None, None]
    where = f"On {joint['windows']:,} {split} windows the residual model's certified perplexity"
    if not is_number(percent):
        return f"{where} could not be measured."
    if all(map(is_number, ends)) and ends[0] <= 0 <= ends[1]:
        return f"{where} is not shown to differ from the base's (gain {gain(percent)}, 95 % interval {_ends(ends)})."
    side = "below" if percent > 0 else "above"
    text = _ends(ends if percent > 0 else [-end if is_number(end) else None for end in reversed(ends)])
    return f"{where} is {abs(percent):.1f} % {side} the base's (95 % interval {text})."


def _nats(joint: dict[str, Any], split: str) -> str:
    """Return the result over a base that only samples."""
    sure = joint["gain"]
    where = f"On {joint['windows']:,} {split} texts of {joint['documents']:,} documents the residual model gains"
    found = f"{number(sure['nats_per_sequence'])} over its base, which only samples"
    ends = f"95 % interval {interval(sure['nats_interval'])}, at most {number(sure['ceiling_nats'])}"
    return f"{where} {found}: {CLAIM}; {ends}."


def _ends(ends: list[Any]) -> str:
    text = gain_interval(ends)
    return "unknown, with so few documents" if text == DASH else text


def verdicts(evaluation: dict[str, Any]) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    found = (evaluation.get("joint") or {}).get("verdict") or ""
    return [*([_sentence(found)] if found else []), *_against(evaluation, are_beaten=False)]


def beaten(evaluation: dict[str, Any]) -> list[str]:
    """Return the baselines that the residual model is shown to beat."""
    return _against(evaluation, are_beaten=True)


def _against(evaluation: dict[str, Any], *, are_beaten: bool) -> list[str]:
    """Return the verdicts on baselines: those that the residual model is shown to beat, or the others."""
    found = []
    for name, baseline in (evaluation.get("baselines") or {}).items():
        ends = (baseline.get("against_joint") or {}).get("interval") or [None, None]
        is_worse = all(map(is_number, ends)) and ends[1] < 0
        if baseline.get("verdict") and is_worse == are_beaten:
            found.append(_sentence(f"against {name}, {baseline['verdict']}"))
    return found


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:].rstrip(".") + "."


def energies(recipe: Recipe) -> list[tuple[str, str]]:
    """Return kind and description of each energy."""
    if not isinstance(recipe, ResidualRecipe) or recipe.energy is None:
        return []
    return [(part.kind, inspect.cleandoc(type(part).__doc__ or "").splitlines()[0]) for part in recipe.energy.split()]


def commands(recipe: Recipe) -> list[str]:
    """Return the commands that reproduce the numbers."""
    is_shipped = recipe.name in recipes() and load_recipe(recipe.name) == recipe
    folder = _folder(recipe)
    first = f"freenergy run {recipe.name}" if is_shipped else f"freenergy run recipe.toml --out {quote(folder)}"
    return [first, f"freenergy evaluate {quote(folder)} --json", f"freenergy report {quote(folder)}"]


def _folder(recipe: Recipe) -> str:
    """Return the default folder of a run."""
    return f"runs/{recipe.name}"


def _study(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a human study, as on the study's own page."""
    return {
        "name": summary["study"],
        "sentence": sentence(summary),
        "simulated": simulated(summary),
        "table": preference(summary),
    }


def _example(example: dict[str, Any]) -> dict[str, Any]:
    """Return a prefix, and its continuations with their labels."""
    rows = []
    for key, title in _KINDS.items():
        if found := example.get(key):
            known = "" if found.get("log_base") is None else f", log P_LM = {number(found['log_base'])}"
            numbers = f"E = {number(found.get('energy'))}{known}"
            rows.append({"kind": key, "title": title, "text": found["text"], "numbers": numbers})
    return {"prefix": example["prefix"], "rows": rows}
