"""Draws with their energies: what the base computes while it draws is not computed again.

    E(x) = Σ_i s_i · E_i(trace of x) + Σ_j s_j · E_j(x)

A probe reads a trace (``lm.activations``), which the base can keep while it draws; so where the energy is a probe of
that base, or a product with such parts, they are nearly free. The other parts read the text, equal strings of a
context once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Energy, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.energies.call import check_energies, energies_in_batches
from freenergy.energies.module import ActivationEnergy, EnergySum
from freenergy.lm.activations import TracingLM


@final
@dataclass(frozen=True, slots=True)
class Split:
    """An energy taken apart into probes of the base that draws, and the rest, each with its scale."""

    probes: tuple[tuple[float, ActivationEnergy], ...]
    others: tuple[tuple[float, Energy], ...]

    @classmethod
    def of(cls, energy: Energy, base: LanguageModel) -> "Split":
        """Probes of another base than the one that draws belong to the rest."""
        probes, others = list[tuple[float, ActivationEnergy]](), list[tuple[float, Energy]]()
        for scale, part in _parts(energy, 1.0):
            if isinstance(part, ActivationEnergy) and id(part.base) == id(base) and isinstance(base, TracingLM):
                probes.append((scale, part))
            else:
                others.append((scale, part))
        if not probes:  # nothing to gain: the energy stays in one piece
            others = [(1.0, energy)]
        return cls(tuple(probes), tuple(others))

    @torch.no_grad()
    def draw(
        self,
        base: LanguageModel,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation = ANCESTRAL,
    ) -> tuple[Draws, Float[Tensor, "B N"]]:
        """Return the draws of ``base.sample`` and the sum of the probes' energies, float64 on the CPU."""
        if not self.probes or not isinstance(base, TracingLM):
            draws = base.sample(contexts, num, space, rng, truncation)
            return draws, torch.zeros(draws.x.shape, dtype=torch.float64)
        layers = sorted({layer for _, probe in self.probes for layer in probe.layers})
        draws, trace = base.sample_traced(contexts, num, space, rng, truncation, layers)
        energy = torch.zeros(draws.x.shape, dtype=torch.float64)
        for scale, probe in self.probes:
            E = probe.energy_of_trace(trace.of_layers([layers.index(layer) for layer in probe.layers]))
            energy += scale * check_energies(E, probe, draws.x.shape).double().cpu()
        return draws, energy

    def rest(self, x: Continuations, *, batch_size: int = 256, allow_inf: bool = False) -> Float[Tensor, "B N"]:
        """Sum the other parts, ``batch_size`` strings per call, float64 on the CPU; +inf needs ``allow_inf``."""
        energy = torch.zeros(x.shape, dtype=torch.float64)
        for scale, part in self.others:
            E = energies_in_batches(part, x, batch_size=batch_size, distinct=True, allow_inf=allow_inf)
            energy += scale * E
        return energy


def _parts(energy: Energy, scale: float) -> Iterator[tuple[float, Energy]]:
    if isinstance(energy, EnergySum):
        for own, part in energy.terms():
            yield from _parts(part, scale * own)
    else:
        yield scale, energy
