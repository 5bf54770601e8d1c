"""``freenergy experiment``: ways of teaching a network, compared at equal compute."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freenergy.cli.root import AsJson, print_json

if TYPE_CHECKING:
    from freenergy.cli.show import Bars


def experiment(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of an experiment such as earm-wikitext.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the experiment; runs/NAME unless given.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, as in --set seeds=[0,1].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a base, continue it in several ways, and compare them at equal compute. A killed experiment resumes."""
    from freenergy.cli.show import Bars
    from freenergy.cli.show.experiment import show_experiment
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
    show_experiment(table)
    drawn = f", its figures in {folder / 'figures'}" if figures else ""
    typer.echo(f"The whole table is in {folder / 'table.md'}{drawn}.")


def _figures(folder: Path, table: dict[str, Any], bars: "Bars") -> list[Path]:
    """Drawn where what draws them is installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        bars.say("for figures: pip install 'freenergy[report]', then the same command again")
        return []
    from freenergy.report.experiment_figures import draw_experiment

    return draw_experiment(folder, table)
