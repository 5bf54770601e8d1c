"""From a sampler's name and settings to the sampler, for the command line and for requests over HTTP alike.

    choose_sampler(model, "metropolis", {"steps": 500}, {"top_k": 10})        steps=500, truncation.top_k=10

``short`` are settings under a name that many samplers share. A setting that the sampler does not have is refused.
"""

from collections.abc import Mapping
from typing import Any

from freenergy.core.errors import UserError
from freenergy.samplers.registry import KERNELS, SAMPLERS, sampler_named, sampler_settings
from freenergy.samplers.sampled import Sampler
from freenergy.text.model import ResidualModel

_OF_TRUNCATION = ("temperature", "top_k", "top_p")


def sampler_names(model: ResidualModel) -> list[str]:
    """Return the names of the samplers that can sample a model; its default comes first."""
    return [*SAMPLERS, *KERNELS] if model.has_energy else ["base"]


def about_samplers(model: ResidualModel) -> list[dict[str, Any]]:
    """Return the same names, each with the names of its settings."""
    return [{"id": name, "settings": sampler_settings(name)} for name in sampler_names(model)]


def choose_sampler(
    model: ResidualModel,
    name: str | None,
    settings: Mapping[str, Any],
    short: Mapping[str, Any],
    *,
    allow_import: bool = False,
) -> Sampler:
    """Make the sampler of this name, or the default of the model: resampling, or the base where there is no energy."""
    name = name or sampler_names(model)[0]
    if not model.has_energy and name != "base":
        raise UserError(
            f"the sampler {name} needs an energy and this model has none: leave the sampler out, or choose base"
        )
    own = sampler_settings(name) if name in SAMPLERS or name in KERNELS else []
    chosen = dict(settings)
    for key, value in short.items():
        place = f"truncation.{key}" if key in _OF_TRUNCATION and key not in own else key
        if value is not None and place in chosen:
            raise UserError(f"the setting {place} is given twice: give it once")
        if value is not None:
            chosen[place] = value
    return sampler_named(name, chosen, allow_import=allow_import)
