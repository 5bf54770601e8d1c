"""The registry of energies: a new energy is its module, one line here, and one row in the contract tests.

Modules are imported when a kind is asked for. ``AnyEnergy`` is the union of all settings, from which a recipe chooses
by ``kind``; ``PartEnergy`` is the union of those that can be parts of a product.
"""

from functools import cache, reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any

from freenergy.core.errors import UserError
from freenergy.energies.settings import EnergySettings

ENERGIES = {
    "unit": "unit:UnitEnergy",
    "bit": "bit:BitEnergy",
    "log-ratio": "log_ratio:LogRatioEnergy",
    "probe": "probe:ProbeEnergy",
    "ngram": "ngram_features:NgramEnergy",
    "repetition": "repetition:RepetitionEnergy",
    "second-lm": "second_lm:SecondLMEnergy",
    "logits": "logits:LogitsEnergy",
    "saved": "saved:SavedEnergy",
    "product": "product:ProductEnergy",
}

if TYPE_CHECKING:
    AnyEnergy = EnergySettings
    PartEnergy = EnergySettings


@cache
def settings_class(kind: str) -> type[EnergySettings]:
    """Return the settings of this kind of energy."""
    if kind not in ENERGIES:
        raise UserError(f"there is no energy of kind {kind!r}: choose one of {', '.join(ENERGIES)}")
    module, name = ENERGIES[kind].split(":")
    found: type[EnergySettings] = getattr(import_module(f"freenergy.energies.{module}"), name)
    return found


def __getattr__(name: str) -> Any:
    if name == "AnyEnergy":
        return reduce(or_, map(settings_class, ENERGIES))
    if name == "PartEnergy":
        return reduce(or_, (settings_class(kind) for kind in ENERGIES if kind != "product"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
