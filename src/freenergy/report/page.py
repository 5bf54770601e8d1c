"""The page: one file with tables, figures, examples, settings and citations; no network, no scripts.

Model output is shown as text: the templates escape everything but the SVGs that are drawn here.
"""

import inspect
import json
from shlex import quote
from typing import Any
from urllib.parse import quote as percent_encoded

from markupsafe import Markup

from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.format import number
from freenergy.evaluation.black_box import has_perplexity
from freenergy.evaluation.ladder import verdict
from freenergy.recipes.families.residual import ResidualRecipe
from freenergy.recipes.load import load_recipe, recipes
from freenergy.recipes.stages.evaluation import STAGE, read_summary
from freenergy.report import page_templates, tables, text_tables
from freenergy.report.citations import cite, methods
from freenergy.report.figures import Drawing
from freenergy.report.study import STUDIES, preference, sentence, simulated
from freenergy.runs.run import Recipe, Run, is_current

PLAYGROUND = "http://127.0.0.1:8000/"  # the default address of `freenergy serve`
_KINDS = {"human": "human", "best": "lowest energy", "typical": "typical energy", "worst": "highest energy"}


def read_evaluation(run: Run[Any]) -> dict[str, Any]:
    """Return the evaluation of a run; raises ``UserError`` if there is none."""
    run.finished("evaluation")
    if not is_current(STAGE, run):
        raise UserError(f"{run.folder} was evaluated with other settings or another version: run its recipe again")
    return read_summary(run, run.stage("evaluation"))


def page(run: Run[Any], evaluation: dict[str, Any], drawings: list[Drawing]) -> str:
    """Return the HTML of a run's report."""
    environment = page_templates()
    environment.filters["playground"] = lambda prefix: f"{PLAYGROUND}#prefix={percent_encoded(prefix, safe='')}"
    records = {stage.name: run.finished(stage.name) for stage in run.recipe.stages()}
    joint, text, rungs = evaluation.get("joint"), evaluation.get("text"), evaluation.get("ladder") or []
    return environment.get_template("report.html.j2").render(
        name=run.recipe.name,
        about=run.recipe.about,
        summary=tables.summary(evaluation),
        verdicts=tables.verdicts(evaluation),
        beaten=tables.against_baselines(evaluation, are_beaten=True),
        joint=joint,
        is_black_box=not has_perplexity(evaluation),
        headline=tables.headline(evaluation),
        ladder=tables.rungs(rungs) if len(rungs) > 1 else None,
        which_paid=verdict(rungs),
        ranking=tables.ranking(evaluation["ranking"]) if evaluation.get("ranking") else None,
        diagnostics=tables.diagnostics(joint) if joint else None,
        text=text_tables.text_statistics(text) if text else None,
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
    far = found.get("distances")
    return {
        "distances": text_tables.distances(far, names[1:], names[1]) if far else None,
        "statistics": text_tables.text_statistics(found["statistics"], names, what),
        "nearer": text_tables.nearer(found["nearer"], names[2:], names[1]),
        "texts": found["texts"],
        "names": names,
    }


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
    return f"runs/{recipe.name}"


def _study(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a human study, as on the study's own page."""
    words = {"name": summary["study"], "sentence": sentence(summary), "simulated": simulated(summary)}
    return words | {"table": preference(summary)}


def _example(example: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for key, title in _KINDS.items():
        if found := example.get(key):
            known = "" if found.get("log_base") is None else f", log P_LM = {number(found['log_base'])}"
            numbers = f"E = {number(found.get('energy'))}{known}"
            rows.append({"kind": key, "title": title, "text": found["text"], "numbers": numbers})
    return {"prefix": example["prefix"], "rows": rows}


def to_toml(table: dict[str, Any]) -> str:
    """Return a recipe as TOML: values first, then one section per table; None is left out, since TOML has no null.

    >>> print(to_toml({"name": "a", "base": {"kind": "ngram", "order": 3, "path": None}}))
    name = "a"
    <BLANKLINE>
    [base]
    kind = "ngram"
    order = 3
    """
    return "\n".join(_lines(table, ())).strip()


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    values = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    lines = ["", f"[{'.'.join(path)}]"] if path and values else []
    lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _lines(value, (*path, key))
    return lines


def _value(value: Any) -> str:
    match value:
        case bool() | str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            pairs = (f"{key} = {_value(inner)}" for key, inner in value.items() if inner is not None)
            return f"{{ {', '.join(pairs)} }}"
        case _:
            return repr(value)
