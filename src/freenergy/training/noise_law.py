"""What training needs of a noise q that is not the base.

    log_ratio(x) = log q(x | c) − log P_LM(x | c)         of data and of negatives, for ``Scores.relative``
    own loss     = − Σ log q_φ(x⁺ | c) / Σ tokens of x⁺   of a noise that learns

The objective sees q_φ without gradient. With the log-ratio the optimum of training is P_data, whatever q is. Without it
(the law of infilled text is unknown, and a truncated q is zero on some data) the energy is trained relative to q.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel, Noise
from freenergy.core.sequences import Continuations
from freenergy.noise.mixture import Mixture
from freenergy.training.contrastive_batches import ContrastiveBatch, StoredContrast, cut

_WINDOWS = 32  # read at a time


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
