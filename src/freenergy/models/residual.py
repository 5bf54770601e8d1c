"""The residual model: a language model and an energy that corrects it.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c),      log_score = log_base − energy = log P(x | c) + log Z(c)

It is a ``Model``, and it can propose: draws of the base (or of the base tempered and truncated) with their weights.
What the base computes while it draws is not computed again:

    E(x) = Σ_i s_i · E_i(trace of x) + Σ_j s_j · E_j(x)

A probe reads a trace (``lm.activations``), which the base can keep while it draws; so where the energy is a probe of
that base, or a product with such parts, they are nearly free. The other parts read the text, equal strings of a
context once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Energy, LanguageModel, Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.energies.call import check_energies, energies_in_batches
from freenergy.energies.module import ActivationEnergy, EnergySum
from freenergy.lm.activations import TracingLM
from freenergy.lm.sample_only import relative_log_prob


def no_energy(x: Continuations) -> Float[Tensor, "B N"]:
    """E = 0: the residual model is the base."""
    return torch.zeros(x.shape, dtype=torch.float64)


@final
@dataclass(frozen=True, slots=True)
class Residual:
    """P(x | c) ∝ P_LM(x | c) · exp(−E(c, x))."""

    base: LanguageModel
    energy: Energy = no_energy

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P_LM(x | c) − E(c, x), float64; with gradients where the energy has them."""
        return self.base.log_prob(x).double() - self.energy(x).double()

    @torch.no_grad()
    def scored(self, x: Continuations, *, allow_inf: bool = False) -> Scored:
        """Score given continuations; with ``allow_inf`` an energy may be +inf, and is refused otherwise.

        A base that only draws has log-probability 0 here: what is known is relative to it (``lm.sample_only``).
        """
        for tokens in (x.contexts.tokens[x.contexts.mask], x.tokens[x.mask]):
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.base.vocab_size:
                raise UserError(
                    f"a token id is not below {self.base.vocab_size}: encode the text with the tokenizer of this model"
                )
        log_base = relative_log_prob(self.base, x)
        energy = energies_in_batches(self.energy, x, allow_inf=allow_inf)
        return Scored(x=x, log_base=log_base, log_proposal=log_base, energy=energy)

    def propose(
        self,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        *,
        truncation: Truncation = ANCESTRAL,
        law: Law = "restricted",
        batch_size: int = 256,
        allow_inf: bool = True,
        advance: Advance | None = None,
    ) -> Scored:
        """Draw ``num`` continuations of each context and score them, at most ``batch_size`` per call of the models.

        Contexts that fit are drawn together. Candidates own their randomness, so ``batch_size`` changes a text only
        where rounding decides.
        """
        if num < 1 or batch_size < 1:
            raise UserError(f"{num} candidates in batches of {batch_size} were asked for: ask for at least one")
        split, rows, together = Split.of(self.energy, self.base), [], max(1, batch_size // num)
        for b in range(0, len(contexts), together):
            some, stream, parts, known = contexts[b : b + together].trimmed(), rng.shift(contexts=b), [], []
            for n in range(0, num, batch_size):
                count = min(batch_size, num - n)
                draws, E = split.draw(self.base, some, count, space, stream.shift(candidates=n), truncation)
                parts.append(draws)
                known.append(E)
                if advance is not None:
                    advance(count * len(some))
            draws = Draws.cat(parts, dim=1)
            E = torch.cat(known, dim=1) + split.rest(draws.x, batch_size=batch_size, allow_inf=allow_inf)
            rows.append(_scored(draws, E, truncation, law))
        return Scored.cat(rows, dim=0)

    def weigh(
        self, draws: Draws, *, truncation: Truncation = ANCESTRAL, law: Law = "restricted", batch_size: int = 256
    ) -> Scored:
        """Score draws that were made before; equal strings of a context are read by the energy once."""
        E = energies_in_batches(self.energy, draws.x, batch_size=batch_size, distinct=True, allow_inf=True)
        return _scored(draws, E, truncation, law)

    def max_context(self, space: SequenceSpace) -> int | None:
        """The longest context that base and energy can read before a continuation; None where there is no limit."""
        longest = [self.base.max_length, *_max_lengths(self.energy)]
        return min((limit - space.length for limit in longest if limit is not None), default=None)


def relative_to_base(target: Target[Model]) -> Target[Residual]:
    """Return the same target with its model as a ``Residual``."""
    return Target(residual_of(target), target.contexts, target.space)


def residual_of(target: Target[Model]) -> Residual:
    """Express any target relative to what proposes for it: P ∝ q · exp(−(log q − log_score))."""
    if isinstance(target.model, Residual):
        return target.model
    if target.proposal is None:
        raise UserError(f"the model {type(target.model).__name__} has no base to draw from: give the target a proposal")
    model, proposal = target.model, target.proposal

    def relative(x: Continuations) -> Tensor:
        return proposal.log_prob(x).double() - model.log_score(x).double()

    return Residual(proposal, relative)


def _scored(draws: Draws, energy: Float[Tensor, "B N"], truncation: Truncation, law: Law) -> Scored:
    log_base, log_proposal = draws.log_base.double().cpu(), draws.log_proposal.double().cpu()
    return Scored(
        x=draws.x, log_base=log_base, log_proposal=log_proposal, energy=energy, law=law, truncation=truncation
    )


def _max_lengths(energy: Energy) -> list[int | None]:
    """How many tokens the networks inside an energy can read."""
    if not isinstance(energy, nn.Module):
        return []
    from freenergy.energies.trunk import Trunk  # here, since it loads transformers

    return [module.max_length for module in energy.modules() if isinstance(module, Trunk)]


class Split(NamedTuple):
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
        odd = [pair for pair in probes if pair[1].after != probes[0][1].after]  # one trace has states of one kind
        probes, others = [pair for pair in probes if pair not in odd], [*others, *odd]
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
        draws, trace = base.sample_traced(contexts, num, space, rng, truncation, layers, after=self.probes[0][1].after)
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
