"""Samplers and kernels by name: a new one is its module, one line here, and one row in the contract tests.

sampler_named("resampling", {"candidates": 64, "truncation.top_k": 10})
sampler_named("single-site", {"steps": 500})          a kernel's name gives chains of it
sampler_named("my_package.mine:Mine", {})             any class that can be imported
choose_sampler(True, "metropolis", {"steps": 500}, {"top_k": 10})        truncation.top_k, as people write it
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.registry import Registry, configured, setting_names
from freenergy.core.roles import Kernel
from freenergy.samplers.chain import Chain
from freenergy.samplers.sampled import Sampler

SAMPLERS = Registry[Sampler](
    "sampler",
    {
        "resampling": "freenergy.samplers.resampling:Resampling",
        "best-of-n": "freenergy.samplers.best_of:BestOf",
        "rejection": "freenergy.samplers.rejection:Rejection",
        "quasi-rejection": "freenergy.samplers.rejection:QuasiRejection",
        "metropolis": "freenergy.samplers.metropolis:Metropolis",
        "tempering": "freenergy.samplers.tempering:Tempering",
        "sequential": "freenergy.samplers.sequential:Sequential",
        "autoregressive": "freenergy.samplers.autoregressive:Autoregressive",
        "base": "freenergy.samplers.resampling:Plain",
    },
)
KERNELS = Registry[Kernel[Any]](
    "kernel",
    {
        "independence": "freenergy.samplers.kernels.independence:Independence",
        "single-site": "freenergy.samplers.kernels.single_site:SingleSite",
        "mixture": "freenergy.samplers.kernels.combined:TextMixture",
        "gibbs": "freenergy.samplers.kernels.gibbs:Gibbs",
        "locally-balanced": "freenergy.samplers.kernels.locally_balanced:LocallyBalanced",
        "discrete-langevin": "freenergy.samplers.kernels.locally_balanced:DiscreteLangevin",
    },
)
REAL_KERNELS = Registry[Any](  # of real-valued states: they move ``Soft`` positions, so they do not sample text by name
    "kernel of real-valued states",
    {
        "langevin": "freenergy.samplers.kernels.langevin:Langevin",
        "sgld": "freenergy.samplers.kernels.langevin:SGLD",
        "hamiltonian": "freenergy.samplers.kernels.langevin:HamiltonianMonteCarlo",
    },
)
_OF_TRUNCATION = ("temperature", "top_k", "top_p")
_CHAIN = [field.name for field in fields(Chain) if field.name != "kernel"]


def sampler_named(name: str, settings: Mapping[str, Any] | None = None, *, allow_import: bool = True) -> Sampler:
    """Make a sampler from its name and settings; text is read like a value in TOML.

    ``allow_import`` lets "module:Class" name a class of another package: never for names from a network.
    """
    settings = settings or {}
    if name in SAMPLERS:
        return configured(SAMPLERS.find(name), settings, f"the sampler {name}")
    if name in KERNELS:
        return _chain(name, KERNELS.find(name), settings)
    if not (allow_import and ":" in name):
        raise UserError(f"there is no sampler {name!r}: choose one of {', '.join([*SAMPLERS, *KERNELS])}")
    part: type[Any] = SAMPLERS.find(name, allow_import=True)
    return _chain(name, part, settings) if hasattr(part, "step") else configured(part, settings, f"the sampler {name}")


def sampler_settings(name: str) -> list[str]:
    """Return the names of the settings of a registered sampler or kernel."""
    return [*_CHAIN, *setting_names(KERNELS.find(name))] if name in KERNELS else setting_names(SAMPLERS.find(name))


def _chain(name: str, kernel: type[Kernel[Any]], settings: Mapping[str, Any]) -> Chain:
    known = setting_names(kernel)
    for setting in settings:
        if setting not in known and setting not in _CHAIN:
            raise UserError(f"the sampler {name} has no setting {setting!r}: it has {', '.join([*_CHAIN, *known])}")
    own = configured(kernel, {key: value for key, value in settings.items() if key not in _CHAIN}, f"the kernel {name}")
    rest = {key: value for key, value in settings.items() if key in _CHAIN}
    return configured(Chain, rest, f"the sampler {name}", kernel=own)


def sampler_names(has_energy: bool) -> list[str]:
    """Return the names of the samplers that can sample a model; its default comes first."""
    return [*SAMPLERS, *KERNELS] if has_energy else ["base"]


def about_samplers(has_energy: bool) -> list[dict[str, Any]]:
    """Return the same names, each with the names of its settings."""
    return [{"id": name, "settings": sampler_settings(name)} for name in sampler_names(has_energy)]


def choose_sampler(
    has_energy: bool,
    name: str | None,
    settings: Mapping[str, Any],
    short: Mapping[str, Any],
    *,
    allow_import: bool = False,
) -> Sampler:
    """Make the sampler of this name, or the default of the model: resampling, or the base where there is no energy.

    ``short`` are settings under a name that many samplers share. A setting that the sampler does not have is refused.
    """
    name = name or sampler_names(has_energy)[0]
    if not has_energy and name != "base":
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
