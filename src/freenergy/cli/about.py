"""Commands that say what there is and what it will cost: recipes, resources, doctor, cost."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from freenergy.cli.root import AsJson, Changes, announce_code, print_json

if TYPE_CHECKING:
    from freenergy.apps.cost_model import Cost, Devices

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def recipes(as_json: AsJson = False) -> None:
    """List the recipes and experiments that come with the package."""
    from freenergy.cli.show import show_table
    from freenergy.recipes.load import experiments
    from freenergy.recipes.load import recipes as known

    found, others = known(), experiments()
    if as_json:
        listed = {"recipes": found, "experiments": others}
        print_json({key: [{"name": name, "about": about} for name, about in of.items()] for key, of in listed.items()})
    else:
        show_table("Recipes: freenergy run NAME", ["name", "about"], [list(row) for row in found.items()])
        show_table("Experiments: freenergy experiment NAME", ["name", "about"], [list(row) for row in others.items()])


def resources(as_json: AsJson = False) -> None:
    """List the texts and models that can be used by name."""
    from freenergy.cli.show import show_table
    from freenergy.corpus.resources import listing

    rows = listing()
    if as_json:
        print_json({"resources": rows})
        return
    for row in rows:
        row |= {"size": f"{row['size'] / 1e6:.1f} MB", "cached": "yes" if row["cached"] else "no"}
    columns = ["name", "kind", "size", "cached", "licence", "description"]
    show_table("Resources", columns, [[str(row[column]) for column in columns] for row in rows])


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and whether it works: a self-test of some ten seconds."""
    from freenergy.cli.doctor import examine
    from freenergy.cli.show import show_table

    findings = examine()
    ok = all(check["ok"] for check in findings["checks"])
    if as_json:
        print_json(findings | {"ok": ok})
    else:
        show_table(
            "What there is", ["what", "value"], [[key, str(value)] for key, value in findings["machine"].items()]
        )
        rows = [["ok" if check["ok"] else "FAILED", check["name"], check["detail"]] for check in findings["checks"]]
        show_table("Self-test", ["", "check", "seen"], rows)
    raise typer.Exit(0 if ok else 1)


def cost(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a recipe such as demo.")],
    changes: Changes = None,
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
    from freenergy.core.errors import UserError
    from freenergy.recipes.families.residual import ResidualRecipe
    from freenergy.recipes.load import load_recipe

    kind = Devices(count=devices, peak=peak, utilisation=utilisation, bandwidth=bandwidth)
    announce_code(recipe)
    loaded = load_recipe(recipe, changes or [])
    if not isinstance(loaded, ResidualRecipe):
        raise UserError(f"the recipe {loaded.name} is not of the family residual, the only one whose cost is known")
    found = cost_of(loaded, Known(vocab_size=vocab_size, train_windows=windows, ranks=devices))
    hours = {stage: kind.hours(each) for stage, each in found.items()}
    if as_json:
        stages = {stage: asdict(each) | {"hours": hours[stage]} for stage, each in found.items()}
        print_json({"recipe": loaded.name, "devices": asdict(kind), "stages": stages})
    else:
        _show_costs(found, hours, kind)


def _show_costs(costs: dict[str, "Cost"], hours: dict[str, float], devices: "Devices") -> None:
    from freenergy.apps.cost_model import Cost
    from freenergy.cli.show import OUT, show_table

    total = sum(costs.values(), Cost())
    rows = [_row(stage, cost, hours[stage]) for stage, cost in costs.items()]
    rows.append(_row("all", total, sum(hours.values())))
    show_table("What it will cost", ["stage", "tokens", "FLOP", "on disk", "time"], rows)
    OUT.print(
        f"Times are for {devices.count} device{'s' * (devices.count != 1)} of {amount(devices.peak)}FLOP/s, "
        f"{devices.utilisation:.0%} of it used: an assumption, unless you have measured it. Not counted: the corpus, "
        "n-gram tables, fits of linear energies, baselines.",
        soft_wrap=True,
    )


def _row(stage: str, cost: "Cost", hours: float) -> list[str]:
    return [stage, amount(cost.tokens), amount(cost.flops), f"{amount(cost.bytes)}B", duration(hours)]


def amount(value: float | int) -> str:
    """Format a number with three digits and an SI prefix.

    >>> amount(1.25e10), amount(12.0)
    ('12.5 G', '12 ')
    """
    for step, letter in _STEPS:
        if value >= step:
            return f"{value / step:.3g} {letter}"
    return f"{value:.3g} "


def duration(hours: float) -> str:
    """Format a time in a suitable unit.

    >>> duration(0.01), duration(30.0), duration(100.0)
    ('36 s', '30 h', '4.17 days')
    """
    if hours < 1 / 60:
        return f"{hours * 3600:.3g} s"
    if hours < 1:
        return f"{hours * 60:.3g} min"
    return f"{hours:.3g} h" if hours < 72 else f"{hours / 24:.3g} days"
