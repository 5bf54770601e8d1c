"""An energy that is linear in what the base computes anyway.

    E(x) = −w · z(φ(x)) − b,      φ(x) = mean hidden states of some layers, and statistics of the base's predictions

The hidden states are those that predicted the tokens of x, so that they exist when x has been sampled
(``lm.activations``): ``energy_of_trace`` then costs one product of vectors. With ``after`` they are those after each
token of x, which costs a step more and tells more about a short x. Statistics are of log p_t, the base's
log-probability of x_t, of the entropy H_t of its prediction, and of the rank of x_t in it; log p_t + H_t is how much
more likely x_t was than expected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.energies.features import FeatureEnergy, read_settings
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit
from freenergy.lm.activations import Trace, TracingLM
from freenergy.lm.presets import Shape

STATISTICS = (
    "Σ log p",
    "mean log p",
    "deviation of log p",
    "least log p",
    "mean entropy",
    "deviation of entropy",
    "mean of log p + entropy",
    "mean log rank",
    "largest log rank",
    "share of rank 1",
    "share of rank over 100",
    "length",
    "mean log p of the first quarter",
    "mean log p of the last quarter",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnergy(EnergySettings):
    """Linear in what the base computes while it samples: pooled hidden states, and statistics of its predictions."""

    fit: ClassVar[Fit] = "convex"
    reads_activations: ClassVar[bool] = True
    kind: Literal["probe"] = "probe"
    layers: tuple[int, ...] = ()  # hidden states that are read, 0 the embeddings; none given: a third, two thirds, last
    states: bool = True
    statistics: bool = True
    after: bool = False  # the states after each token, so that the last one is seen too, not those that predicted it

    def build(self, inputs: BuildInputs) -> "Probe":
        """Read the base."""
        return Probe(self, inputs.base)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that are read of a base with ``num_layers``; none where states are left out."""
        return layers_read(self.layers, num_layers) if self.states else ()

    def num_features(self, base: Shape | None) -> int:
        """Return how many states and statistics there are; 0 where the shape of the base is not known."""
        if base is None:
            return 0
        return len(self.layers_of(base.layers)) * base.width + len(STATISTICS) * self.statistics


@final
class Probe(FeatureEnergy):
    """w · (mean states and statistics of the base)."""

    def __init__(self, settings: ProbeEnergy, base: LanguageModel) -> None:
        if not isinstance(base, TracingLM):
            raise UserError(
                f"an energy of kind 'probe' reads hidden states, which a {type(base).__name__} does not show: take a "
                "base with a network, or an energy of another kind"
            )
        layers = settings.layers_of(base.num_layers)
        states = [f"layer {layer}, state {i}" for layer in layers for i in range(base.width)]
        super().__init__(settings, states + list(STATISTICS if settings.statistics else ()))
        if not self.names:
            raise UserError("a probe of neither states nor statistics has nothing to read: set one of them to true")
        self.base, self.reads_statistics = base, settings.statistics
        self.layers, self.after = layers, settings.after

    def features(self, x: Continuations, *, leave_self_out: bool = False) -> Float[Tensor, "B N F"]:
        """Compute φ(x), read by the base; ``leave_self_out`` changes nothing, as the base holds no counts."""
        return self.features_of(self.base.trace(x, self.layers, after=self.after))

    def features_of(self, trace: Trace) -> Float[Tensor, "B N F"]:
        """Compute φ(x) from a trace of ``self.layers``, with states as ``self.after`` says."""
        states = trace.states.flatten(2).double()
        return torch.cat([states, statistics(trace)], dim=-1) if self.reads_statistics else states

    def energy_of_trace(self, trace: Trace) -> Float[Tensor, "B N"]:
        """Compute E(x) of continuations that were traced while they were sampled."""
        return self.energy_of(self.features_of(trace))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Probe":
        """Read what ``save_pretrained`` wrote; ``base`` is the one that it was trained with."""
        energy = cls(ProbeEnergy(**read_settings(Path(folder), "probe")), base)
        energy._restore(Path(folder))
        return energy


def statistics(trace: Trace) -> Float[Tensor, "B N S"]:
    """Return the statistics of a trace, float64; zeros for a continuation of no tokens."""
    mask, log_p, entropy, log_rank = trace.mask, trace.log_p.double(), trace.entropy.double(), trace.log_rank.double()
    if not mask.shape[-1]:
        return torch.zeros(*mask.shape[:2], len(STATISTICS), dtype=torch.float64, device=mask.device)
    length = mask.sum(-1)
    place, quarter = torch.arange(mask.shape[-1], device=mask.device), -(-length // 4).unsqueeze(-1)
    columns = [
        torch.where(mask, log_p, 0).sum(-1),
        _mean(log_p, mask),
        _deviation(log_p, mask),
        torch.where(mask, log_p, 0).amin(-1),  # log p is never above 0
        _mean(entropy, mask),
        _deviation(entropy, mask),
        _mean(log_p + entropy, mask),
        _mean(log_rank, mask),
        torch.where(mask, log_rank, 0).amax(-1),
        _mean((log_rank == 0).double(), mask),
        _mean((log_rank > 4.6102).double(), mask),  # between log 100 and log 101
        length.double(),
        _mean(log_p, mask & (place < quarter)),
        _mean(log_p, mask & (place >= length.unsqueeze(-1) - quarter)),
    ]
    return torch.stack(columns, dim=-1)


def _mean(values: Float[Tensor, "B N L"], mask: Bool[Tensor, "B N L"]) -> Float[Tensor, "B N"]:
    return torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def _deviation(values: Float[Tensor, "B N L"], mask: Bool[Tensor, "B N L"]) -> Float[Tensor, "B N"]:
    return _mean((values - _mean(values, mask).unsqueeze(-1)) ** 2, mask).sqrt()


def layers_read(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers that are read: those given, or a third and two thirds of the way and the last."""
    chosen = layers or [round(num_layers / 3), round(2 * num_layers / 3), num_layers]
    strange = [layer for layer in chosen if not 0 <= layer <= num_layers]
    if strange:
        raise UserError(f"the base has no layer {strange[0]}: choose layers from 0 (the embeddings) to {num_layers}")
    return tuple(sorted(set(chosen)))
