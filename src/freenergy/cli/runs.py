"""Commands that make, measure and check runs: run, experiment, evaluate, report, verify, cite."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freenergy.cli.root import AsJson, Changes, Device, RunFolder, announce_code, print_json, refuse

if TYPE_CHECKING:
    from freenergy.cli.show import Bars
    from freenergy.runs.run import Recipe, StageResult

_WRITE = "Write with it: freenergy sample {folder} --prefix 'Once upon a time'"
WorkersName = Annotated[
    str,
    typer.Option(
        envvar="FREENERGY_WORKERS",
        help="Workers for parallel stages: local (one process per cores // torch threads), local:N, ray, or "
        "ray:ADDRESS of a cluster. The result is bit-identical.",
    ),
]


def run(
    recipe: Annotated[str, typer.Argument(help="A TOML file, FILE.py:FUNCTION, or a name from `freenergy recipes`.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME unless given.")] = None,
    stage: Annotated[str | None, typer.Option(help="Stop after this stage, such as base or energy.")] = None,
    changes: Changes = None,
    workers: WorkersName = "local",
    discard_replaced: Annotated[
        bool, typer.Option("--discard-replaced", help="In the end delete what other settings have left in the run.")
    ] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Do every stage of a recipe; what is done already is not done again."""
    from freenergy.corpus.resources import ResourceUnavailable
    from freenergy.recipes.load import load_recipe
    from freenergy.runs.folder import discard_replaced as discard

    announce_code(recipe)
    loaded = load_recipe(recipe, changes or [])
    try:
        _run(loaded, out, stage, workers, as_json)
        if discard_replaced:
            discard(Path(out) if out is not None else Path("runs") / loaded.name)
    except ResourceUnavailable as error:
        fallback = getattr(loaded, "fallback", "")  # a recipe that a Python function made may have none
        if not fallback:
            raise
        typer.echo(f"{error}; {fallback} is run instead", err=True)
        _run(load_recipe(fallback, changes or []), out, stage, workers, as_json)


def _with_costs(result: "StageResult", folder: Path) -> "StageResult":
    """Return an evaluation with what each rung of its ladder cost, as the report shows it."""
    from freenergy.recipes.load import load_text_run
    from freenergy.recipes.stages.evaluation import read_summary

    if result.name != "evaluation" or "ladder" not in result.summary:
        return result
    return replace(result, summary=read_summary(load_text_run(folder), folder / "evaluation"))


def _run(loaded: "Recipe", out: Path | None, stage: str | None, workers: str, as_json: bool) -> None:
    """Do the stages of one recipe and show what came of them."""
    from freenergy.cli.show import Bars
    from freenergy.cli.show.results import show_stage
    from freenergy.core.workers.pool import worker_pool
    from freenergy.recipes import run as run_recipe
    from freenergy.training.distributed.ranks import Ranks

    folder = out or Path("runs") / loaded.name
    if not Ranks.found().is_first:  # it takes part, and the first one speaks
        for _ in run_recipe(loaded, folder, stage=stage):
            pass
        return
    results: dict[str, Any] = {}
    with Bars() as bars, worker_pool(workers) as pool:
        for result in run_recipe(loaded, folder, stage=stage, progress=bars, workers=pool):
            results[result.name] = result.summary | {"seconds": result.seconds, "cached": result.was_cached}
            if not as_json:
                show_stage(_with_costs(result, folder))
        is_reported = stage is None and "evaluation" in results
        page = _page(folder, bars) if is_reported else None
    if as_json:
        print_json({"run": str(folder), "stages": results, "report": None if page is None else str(page)})
        return
    if page is not None:
        typer.echo(f"What it has shown, with figures: open {page} in a browser.")
    is_tagger = getattr(loaded, "family", "") == "tagging"
    use = f"Tag with it: freenergy tag {folder} FILE" if is_tagger else _WRITE.format(folder=folder)
    typer.echo(f"The run is in {folder}. {use}")


def _page(folder: Path, bars: "Bars") -> Path | None:
    """The report of a finished run, where what draws it is installed."""
    from freenergy.recipes import load_run
    from freenergy.report import can_draw, write_report

    if can_draw():
        return write_report(load_run(folder), bars)
    bars.say(f"for a page with figures: pip install 'freenergy[report]', then freenergy report {folder}")
    return None


def experiment(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of an experiment such as earm-wikitext.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the experiment; runs/NAME unless given.")] = None,
    changes: Changes = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train a base, continue it in several ways, and compare them at equal compute. A killed experiment resumes."""
    from freenergy.cli.show import Bars
    from freenergy.recipes.load import load_experiment
    from freenergy.runs.sweep.run import folder_of, run_sweep

    loaded = load_experiment(recipe, changes or [])
    folder = folder_of(loaded, out)
    with Bars() as bars:
        table = run_sweep(loaded, folder, progress=bars)
        figures = _figures(folder, table, bars)
    if as_json:
        print_json({**table, "experiment": str(folder), "figures": [str(path) for path in figures]})
        return
    _show_experiment(table)
    drawn = f", its figures in {folder / 'figures'}" if figures else ""
    typer.echo(f"The whole table is in {folder / 'table.md'}{drawn}.")


def _figures(folder: Path, table: dict[str, Any], bars: "Bars") -> list[Path]:
    from freenergy.report import can_draw

    if not can_draw():
        bars.say("for figures: pip install 'freenergy[report]', then the same command again")
        return []
    from freenergy.report.experiment_figures import draw_experiment

    return draw_experiment(folder, table)


def _show_experiment(table: dict[str, Any]) -> None:
    from freenergy.cli.show import OUT, show_table, show_wide
    from freenergy.runs.sweep.table import budget, difference_rows, main_rows

    show_wide(table["name"], *main_rows(table))
    head, rows = difference_rows(table, with_base=False)
    if rows:
        show_table("Against the control of equal compute", head, rows)
    OUT.print(budget(table))


def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with an energy.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Measure on this text (.txt, .jsonl, .parquet); may be given again.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Measure on this many windows.")] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates a window, the true text among them: one more than the draws.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Measure on the run's test or validation text.")] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Measure the baselines on this text too.")] = False,
    workers: WorkersName = "local",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure base, residual model and baselines, with bounds; without options, show what the run has measured."""
    from freenergy.cli.show import Bars
    from freenergy.cli.show.results import show_evaluation
    from freenergy.core.workers.pool import worker_pool
    from freenergy.recipes.load import load_run
    from freenergy.recipes.stages.evaluation import EvaluationRequest
    from freenergy.recipes.stages.evaluation import evaluate as measure

    request = EvaluationRequest(
        texts=tuple(text or ()), split=split, windows=windows, candidates=candidates, baselines=baselines
    )
    with Bars() as bars, worker_pool(workers) as pool:
        if getattr(load_run(run_folder).recipe, "family", "") == "tagging":
            from freenergy.recipes.stages.tagging import evaluate_tagger

            summary = evaluate_tagger(run_folder, request, bars)
        else:
            summary = measure(run_folder, request, bars, workers=pool)
    if as_json:
        print_json(summary)
    else:
        show_evaluation(summary)


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    as_json: AsJson = False,
) -> None:
    """Write one page with the tables, figures and examples of a run."""
    from freenergy.cli.show import Bars
    from freenergy.recipes import load_run
    from freenergy.report import write_report

    with Bars() as bars:
        path = write_report(load_run(run_folder), bars)
    if as_json:
        print_json({"report": str(path)})
    else:
        typer.echo(f"The report is in {path}: open it in a browser.")


def verify(
    run_folder: RunFolder,
    sign: Annotated[
        Path | None, typer.Option(help="Sign the run with this private key (Ed25519, as of ssh-keygen).")
    ] = None,
    trust: Annotated[Path | None, typer.Option(help="Accept the run only if this public key has signed it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the checksum of every file that the stages of a run wrote, and with a key who vouches for it."""
    from freenergy.cli.show import Bars
    from freenergy.core.checksums import RECIPE
    from freenergy.core.signing import check_signature
    from freenergy.core.signing import sign as put_signature
    from freenergy.recipes import verify as compare

    if not (run_folder / RECIPE).is_file():
        refuse(f"{run_folder} is not a run: give the folder that `freenergy run` made (it has a {RECIPE})")
    with Bars() as bars:
        found = compare(run_folder, bars)
    for paths, what in ((found.damaged, "does not match its checksum"), (found.unknown, "was not written by a stage")):
        if paths:
            others = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
            remedy = f"delete {', '.join(found.rerun) or 'it'} in {run_folder} and run the recipe again"
            refuse(f"{paths[0]} {what}{others}: {remedy}", **asdict(found))
    if trust is not None:
        check_signature(run_folder, trust)
    if sign is not None:
        put_signature(run_folder, sign)
    verdict = "unchanged since sealed" if trust is None else "unchanged and by this key"
    if as_json:
        print_json(asdict(found) | {"verdict": verdict})
        return
    size = f"{found.files:,} files of {len(found.stages)} stages, {found.bytes / 1e6:,.1f} MB"
    typer.echo(f"{size}: every checksum matches, {verdict}.")
    if found.without_checksums:
        typer.echo(f"Written before freenergy kept checksums, so not verified: {', '.join(found.without_checksums)}.")


def cite(run_folder: RunFolder, as_json: AsJson = False) -> None:
    """Print the references of the methods that a run has used, as BibTeX."""
    from freenergy.recipes import load_run
    from freenergy.report import cite as references

    found = references(load_run(run_folder))
    if as_json:
        print_json({"bibtex": found})
    else:
        typer.echo(found)
