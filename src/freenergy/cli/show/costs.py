"""Prints the cost table."""

from freenergy.apps.cost_model import Cost, Devices
from freenergy.cli.show.tables import OUT, show_table

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show_costs(costs: dict[str, Cost], hours: dict[str, float], devices: Devices) -> None:
    """Print one row per stage, and the assumptions."""
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


def _row(stage: str, cost: Cost, hours: float) -> list[str]:
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
