"""Data and negatives side by side, as an energy reads them in training, and the law of the negatives.

    x = [datum, negative 1, …, negative K]      [B, 1 + K], one shared prefix per row

Stored negatives are drawn from uniformly, as in Deng et al. (2020); fresh ones are drawn again at every step.

An energy that is to judge unfinished texts reads data and negatives alike cut to t tokens. The negatives of a cut are
draws of P_LM(x_≤t | c), so the optimum of every cut is the log-ratio of marginals,

    E(x_≤t) = log P_LM(x_≤t | c) − log truth(x_≤t | c)  +  a constant of t

and where the whole energy is at its optimum too, e^{−E(x_≤t)} is proportional to E_{P_LM}[e^{−E(x)} | x_≤t].

Of a noise q that is not the base, training needs

    log_ratio(x) = log q(x | c) − log P_LM(x | c)         of data and of negatives, for ``Scores.relative``
    own loss     = − Σ log q_φ(x⁺ | c) / Σ tokens of x⁺   of a noise that learns

The objective sees q_φ without gradient. With the log-ratio the optimum of training is P_data, whatever q is. Without it
(the law of infilled text is unknown, and a truncated q is zero on some data) the energy is trained relative to q.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel, Noise, NoiseState, Scores
from freenergy.core.sequences import Continuations
from freenergy.corpus import Windows
from freenergy.noise.mixture import Mixture
from freenergy.noise.store import NegativeStore

_WINDOWS = 32  # read at a time for their law


@runtime_checkable
class Contrast(Protocol):
    """Provides windows, each with negatives of the same prefix; ``init`` is the state of the noise before them."""

    def __len__(self) -> int: ...
    def init(self, rng: Rng) -> NoiseState: ...  # noqa: D102
    def batch(  # noqa: D102
        self, index: Int[Tensor, " batch"], num: int, rng: Rng, state: NoiseState | None = None
    ) -> "ContrastiveBatch": ...


@final
@dataclass(frozen=True, slots=True)
class ContrastiveBatch:
    """What an energy reads in one step, and where stored strings stand: row, and column with the datum at 0.

    Rows are the windows, and with several cuts all windows of the first cut, then all of the second, …
    """

    x: Continuations
    index: Int[Tensor, " batch"]
    columns: Int[Tensor, "batch candidates"] | None = None  # None where the negatives are fresh
    log_base: Float[Tensor, "batch num"] | None = None  # log P_LM of the negatives, where they are whole
    log_noise: Float[Tensor, "batch num"] | None = None  # with which they were drawn, likewise
    state: NoiseState = field(default_factory=dict)  # of the noise after this batch


def scores_of(
    E: Float[Tensor, "B candidates"], log_ratio: Float[Tensor, "B candidates"] | None = None
) -> tuple[Scores, Scores]:
    """Returns the scores of data (the first column) and of negatives; ``log_ratio`` is log noise − log P_LM."""
    ratios = (None, None) if log_ratio is None else (log_ratio[:, :1], log_ratio[:, 1:])
    return Scores.relative(E[:, :1], ratios[0]), Scores.relative(E[:, 1:], ratios[1])


def cuts(length: int, num: int) -> tuple[int, ...]:
    """``num`` lengths, evenly spaced, the last one whole.

    >>> cuts(40, 4), cuts(5, 2)
    ((10, 20, 30, 40), (3, 5))
    """
    if num > length:
        raise UserError(
            f"an energy cannot be fitted at {num} lengths of continuations of {length} tokens: set training.lengths to "
            f"{length} or less"
        )
    return tuple(-(-length * k // num) for k in range(1, num + 1))


def cut(x: Continuations, length: int) -> Continuations:
    """The first ``length`` tokens of each continuation; what has ended before stays whole."""
    return Continuations(x.contexts, x.tokens[:, :, :length], x.lengths.clamp(max=length))


@final
class StoredContrast:
    """Negatives that were drawn once: a training step takes ``num`` of them at random."""

    def __init__(self, windows: Windows, store: NegativeStore) -> None:
        self.windows, self.store = windows, store

    def __len__(self) -> int:
        return len(self.store)

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: everything is drawn."""
        return {}

    def batch(
        self, index: Int[Tensor, " batch"], num: int, rng: Rng, state: NoiseState | None = None
    ) -> ContrastiveBatch:
        """The windows at these places, the datum first and a random choice of its negatives after it."""
        K = self.store.per_prefix
        if num > K:
            raise UserError(
                f"a training step takes {num} negatives of each prefix but {K} are stored: "
                "set training.negatives lower or negatives.per_prefix higher"
            )
        data = self.windows.continuations(self.store.rows[index])
        draws = self.store.draws(index, data.contexts)
        x = Continuations.cat([data, draws.x], dim=1)
        order = rng.child("negatives").uniform(len(index), K).argsort(1)[:, :num] + 1
        chosen = torch.cat([torch.zeros(len(index), 1, dtype=torch.long), order], dim=1)
        rows = torch.arange(len(index)).unsqueeze(1)
        picked = Continuations(x.contexts, x.tokens[rows, chosen], x.lengths[rows, chosen])
        log_base, log_noise = (each.gather(1, order - 1) for each in (draws.log_base, draws.log_proposal))
        return ContrastiveBatch(picked, index, chosen, log_base, log_noise)

    def all(self, index: Int[Tensor, " batch"]) -> Continuations:
        """The windows at these places with all their negatives."""
        data = self.windows.continuations(self.store.rows[index])
        return Continuations.cat([data, self.store.draws(index, data.contexts).x], dim=1)


@final
class FreshContrast:
    """Negatives that are drawn when they are asked for."""

    def __init__(self, windows: Windows, rows: Int[Tensor, " rows"], noise: Noise) -> None:
        self.windows, self.rows, self.noise = windows, rows, noise

    def init(self, rng: Rng) -> NoiseState:
        """Returns the state of the noise before its first draw."""
        return self.noise.init(rng)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(
        self, index: Int[Tensor, " batch"], num: int, rng: Rng, state: NoiseState | None = None
    ) -> ContrastiveBatch:
        """The windows at these places with new negatives, from the stream of this step; ``state`` is the noise's."""
        data = self.windows.examples(self.rows[index])
        after, draws = self.noise.draw(None, state or {}, data, num, rng.child("negatives"))
        x = Continuations.cat([data.x, draws.x.to(data.x.tokens.device)], dim=1)
        log_base, log_noise = (each.double().cpu() for each in (draws.log_base, draws.log_proposal))
        return ContrastiveBatch(x, index, log_base=log_base, log_noise=log_noise, state=after)


@final
class NoiseLaw:
    """The law of ``noise`` relative to ``base``."""

    def __init__(self, noise: Noise, base: LanguageModel) -> None:
        self.noise, self.base = noise, base

    @property
    def module(self) -> nn.Module | None:
        """The weights of a noise that learns, or None."""
        module: nn.Module | None = getattr(self.noise, "module", None)
        return module

    @property
    def rate(self) -> float:
        """The learning rate of the noise relative to the energy's."""
        return float(getattr(self.noise, "rate", 1.0))

    def of(self, batch: ContrastiveBatch) -> Float[Tensor, "batch candidates"]:
        """Returns the log-ratio of a batch; negatives that are whole came with theirs, except from a mixture."""
        if batch.log_noise is None or batch.log_base is None or isinstance(self.noise, Mixture):
            return self.log_ratio(batch.x)
        data = self.log_ratio(batch.x.candidates(slice(0, 1)))
        return torch.cat([data, batch.log_noise - batch.log_base], dim=1)

    @torch.no_grad()
    def log_ratio(self, x: Continuations) -> Float[Tensor, "batch candidates"]:
        """Returns the log-ratio of any continuations, from reading them."""
        found = self._log_noise(x).double().cpu() - self.base.log_prob(x).double().cpu()
        if not found.isfinite().all():
            raise UserError(
                "the noise never draws some of the text that it is compared with, so its law cannot correct for it: "
                "leave top_k and top_p out of one source of negatives"
            )
        return found

    def of_all(self, contrast: StoredContrast, lengths: Sequence[int | None]) -> Float[Tensor, "rows candidates"]:
        """Returns the log-ratio of all windows with all their negatives, cut to each of the lengths in turn."""
        parts = []
        for length in lengths:
            for index in torch.arange(len(contrast)).split(_WINDOWS):
                x = contrast.all(index)
                parts.append(self.log_ratio(x if length is None else cut(x, length)))
        return torch.cat(parts)

    def own_loss(self, data: Continuations) -> Float[Tensor, ""]:
        """Returns the cross-entropy of the data under the noise, in nats per token, with gradient."""
        return -self._log_noise(data).sum() / data.lengths.sum().clamp(min=1)

    def _log_noise(self, x: Continuations) -> Tensor:
        found = self.noise.log_noise(x)
        if found is None:
            raise UserError(f"the law of {type(self.noise).__name__} is unknown: train relative to it, without a law")
        return found
