"""An energy that holds a second language model against the base.

    E(c, x) = α · (log P_LM(x | c) − log Q(x | c)) + w · pool(h_Q(c, x)) + b

Q begins as a copy of the base, so E = 0 at the start; α, Q, w and b learn. With α = 1 and w = b = 0 the residual model
is Q itself, and log Z = 0. One reading of Q gives both its states and its log-probabilities; the base is read by the
same code, so that the two agree to the last bit while their weights do.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import in_batches, wants_gradients
from freenergy.energies.module import EnergyModule
from freenergy.energies.saving import copied, fill, linear_head, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit, Over, Pool
from freenergy.energies.trunk import Readout, States, Trunk, readable
from freenergy.lm.presets import set_dropout
from freenergy.lm.stepping import sum_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatioEnergy(EnergySettings):
    """α·(log P_LM − log Q) + a pooled scalar of Q's states; Q begins as a copy of the base, and learns."""

    fit: ClassVar[Fit] = "gradient"
    predicts_tokens: ClassVar[bool] = True
    is_causal: ClassVar[bool] = True
    kind: Literal["log-ratio"] = "log-ratio"
    alpha: float = 0.25
    pool: Pool = "mean"
    over: Over = "continuation"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "dropout", at_least=0, below=1)
        if not math.isfinite(self.alpha):
            raise UserError(f"alpha is {self.alpha}: set it to a number, such as 0.25")

    def build(self, inputs: BuildInputs) -> "LogRatio":
        """Start with Q as a copy of the base."""
        return LogRatio(self, inputs.base)


@final
class LogRatio(EnergyModule):
    """``network`` is a Q that was trained before; without it Q is a copy of the base."""

    def __init__(
        self, settings: LogRatioEnergy, base: LanguageModel, *, network: "PreTrainedModel | None" = None
    ) -> None:
        super().__init__()
        self.settings, self.eos = settings, base.eos
        model = network_of(base, settings.kind)
        # in a tuple, so that the base is not a part of this module: it is neither trained nor saved
        self._base = reader_of(model, settings.kind)
        q = network or copied(model)
        set_dropout(q, settings.dropout)
        self.trunk, self.head = Trunk(without_head(q), "causal"), q.get_output_embeddings()
        self.readout = Readout(self.trunk.width, pool=settings.pool, over=settings.over, dtype=q.dtype)
        self.alpha = nn.Parameter(torch.tensor([settings.alpha], dtype=q.dtype))  # a scalar could not be sharded
        self.to(q.device)

    def forward(self, x: Continuations, log_base: Float[Tensor, "B N"] | None = None) -> Float[Tensor, "B N"]:
        """Compute E(c, x); ``log_base`` is log P_LM(x | c) where known, so that the base need not read x again."""
        x = readable(x, self.eos, self.trunk.device)
        if not wants_gradients(self):
            ours = in_batches(x, self.trunk, lambda states, part: self._against(0.0, states, part))
            return ours + self.alpha * (self.log_base(x) if log_base is None else log_base.to(ours))
        if log_base is None:
            with torch.no_grad():
                trunk, head = self._base
                log_base = log_prob(trunk(x), head, x)
        return self._against(log_base.to(x.tokens.device), self.trunk(x), x)

    def log_base(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c), read by the code that reads Q."""
        trunk, head = self._base
        return in_batches(readable(x, self.eos, trunk.device), trunk, lambda states, part: log_prob(states, head, part))

    def _against(self, log_base: Tensor | float, states: States, x: Continuations) -> Float[Tensor, "B N"]:
        energy: Tensor = self.alpha * (log_base - log_prob(states, self.head, x)) + self.readout(states)
        return energy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all; the base is not in it."""
        with saved(folder, self, self.settings, self.trunk.network):
            pass

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "LogRatio":
        """Return the energy as it was saved, compared with the given base."""
        settings = LogRatioEnergy(**read_record(folder)["settings"])
        energy = cls(settings, base, network=rebuilt(folder, with_head=True))
        fill(folder, energy)
        return energy


def log_prob(states: States, head: nn.Module, x: Continuations) -> Float[Tensor, "B N"]:
    """Compute Σ_t log softmax(head(h_{t−1}))[x_t], where h_0 is the state of the prefix's last token."""
    logits = head(predicting(states, x))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    picked = logits.gather(-1, x.tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return sum_tokens(picked, x.mask)


def predicting(states: States, x: Continuations) -> Float[Tensor, "B N L H"]:
    """Compute h_{t−1} of each token x_t: the state that predicts it."""
    B, N, L = x.tokens.shape
    M, H = states.prefix.shape[1], states.prefix.shape[3]
    last = (states.prefix_mask.sum(-1) - 1).view(B, M, 1, 1).expand(B, M, 1, H)
    first = states.prefix.gather(2, last).expand(B, N, 1, H)
    return torch.cat([first, states.x], dim=2)[:, :, :L]


def reader_of(model: "PreTrainedModel", kind: str) -> tuple[Trunk, nn.Module]:
    """Return the trunk and the head; refuse a model that does more to its states before it predicts."""
    head = linear_head(model)
    if head is None:
        raise UserError(
            f"{type(model).__name__} does not predict by one linear layer, which an energy of kind {kind!r} needs: "
            'take kind = "unit" or "bit"'
        )
    return Trunk(without_head(model), "causal"), head
