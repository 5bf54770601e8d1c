"""``freenergy cost``: what a run will cost, before it starts."""

from dataclasses import asdict
from typing import Annotated

import typer

from freenergy.cli.root import AsJson, print_json


def cost(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a recipe such as demo.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, as in --set evaluation.candidates=10000.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    peak: Annotated[float, typer.Option(help="Peak operations per second of one device.")] = 1.8e11,
    utilisation: Annotated[float, typer.Option(help="Fraction of the peak that is reached.")] = 0.5,
    bandwidth: Annotated[float, typer.Option(help="Bytes per second that a device sends.")] = 1e10,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary size, if the recipe does not say.")] = None,
    windows: Annotated[int | None, typer.Option(help="Number of training windows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a run will cost: tokens, operations, bytes, and hours on given devices."""
    from freenergy.apps.cost_model import Devices, Known, cost_of
    from freenergy.cli.show.costs import show_costs
    from freenergy.core.errors import UserError
    from freenergy.recipes.families.residual import ResidualRecipe
    from freenergy.recipes.load import load_recipe

    kind = Devices(count=devices, peak=peak, utilisation=utilisation, bandwidth=bandwidth)
    loaded = load_recipe(recipe, changes or [])
    if not isinstance(loaded, ResidualRecipe):
        raise UserError(f"the recipe {loaded.name} is not of the family residual, the only one whose cost is known")
    found = cost_of(loaded, Known(vocab_size=vocab_size, train_windows=windows, ranks=devices))
    hours = {stage: kind.hours(each) for stage, each in found.items()}
    if as_json:
        stages = {stage: asdict(each) | {"hours": hours[stage]} for stage, each in found.items()}
        print_json({"recipe": loaded.name, "devices": asdict(kind), "stages": stages})
    else:
        show_costs(found, hours, kind)
