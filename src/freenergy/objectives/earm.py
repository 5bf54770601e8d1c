"""E-ARM: one network is the autoregressive model and the energy (Wang et al. 2022).

    f(v; x_<k) = the logits,   S(x_<k) = log Σ_v e^{f(v; x_<k)},   log q(x_k | x_<k) = f(x_k; x_<k) − S(x_<k)
    p_k(x_k, x_<k) = q(x_<k) · e^{f(x_k; x_<k)} / Z_k = q(x_k, x_<k) · e^{S(x_<k)} / Z_k          (Eq. 4, φ = −f)

A softmax does not see a number added to all its logits, so S is free to say how likely a whole beginning is. Training
makes Σ_k λ_k KL(data ‖ p_k) small (Eq. 6). With x from the data and y from q itself, its gradient is (Eq. 15)

    Σ_k λ_k { −E_x ∇[log q̃(x_<k) + f(x_k; x_<k)] + E_y w(y_<k) ∇[log q̃(y_<k) + f(y_k; y_<k)] }
    w(y_<k) = e^{S(y_<k)} / Z_k,     Z_k = E_y e^{S(y_<k)}                                         (Eq. 13)

q̃ is q with a fixed copy in place of all but the last m conditionals, so that early tokens are not pushed at every later
step (below Eq. 16). Z_k is the mean over the fake rows of a batch, averaged over batches (``Denominators``).

Two terms have a mean that is known. E_y ∇ log q̃(y_<k) = 0, so w may be w − 1 there; and the mean of ∇f(y_k; y_<k) over
y_k is ∇S(y_<k). ``reduced`` uses both: the same expected gradient with less noise. ``Parts`` shows what is then left
next to cross-entropy: where all w are 1 it is ∇(E_y S − E_x S) alone, and that moves q through shared weights only.

Rows that have ended before k take part neither in data nor in fakes: p_k is then a law over beginnings that continue
to k. The loss is a mean over the data's tokens: step k counts λ_k times the rows that reach it.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.roles import Loss


class Steps(NamedTuple):
    """All that the objective sees of rows: two numbers per step."""

    logit: Float[Tensor, "rows K"]  # f(x_k; x_<k)
    log_sum: Float[Tensor, "rows K"]  # S(x_<k)
    mask: Bool[Tensor, "rows K"]  # the steps that a row has

    @classmethod
    def of(
        cls, logits: Float[Tensor, "rows K V"], tokens: Int[Tensor, "rows K"], mask: Bool[Tensor, "rows K"]
    ) -> "Steps":
        """From a network's logits and the tokens that came."""
        return cls(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), logits.logsumexp(-1), mask)

    @property
    def log_prob(self) -> Float[Tensor, "rows K"]:
        """log q(x_k | x_<k)."""
        return self.logit - self.log_sum


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EARM:
    """The objective that is added to cross-entropy, and when it starts."""

    weight: float = 1.0  # of this objective per token; cross-entropy has 1
    length: int = 50  # K, fake tokens of a row
    recent: int = 2  # m, the conditionals before x_k that gradients go through
    start_epoch: float = 1.0  # epochs of cross-entropy alone; the paper's 10 to 15 are for runs of many more
    decay: float = 0.9  # of the average of Z_k over batches; 0 takes each batch's own
    step_weights: tuple[float, ...] = ()  # λ_1 … λ_K; none given: all 1
    reduced: bool = False  # known means in place of noise; False is Eq. 15 as it stands

    def __post_init__(self) -> None:
        check_range(self, "length", at_least=1, hint=" fake tokens")
        check_range(self, "start_epoch", at_least=0)
        check_range(self, "weight", above=0, hint=", or leave E-ARM out")
        check_range(self, "decay", at_least=0, below=1)
        if not 0 <= self.recent <= self.length:
            raise UserError(
                f"recent is {self.recent} and length {self.length}: gradients can go through at least 0 and at most "
                "as many conditionals as there are fake tokens"
            )
        if self.step_weights and (len(self.step_weights) != self.length or min(self.step_weights) < 0):
            raise UserError(
                f"step_weights has {len(self.step_weights)} numbers for {self.length} fake tokens: give one for each, "
                "none below 0"
            )

    def __call__(self, data: Steps, fakes: Steps, log_z: Float[Tensor, " K"]) -> Loss:
        """Returns a loss whose gradient is Eq. 15, per token; ``log_z`` is log Z_k, from ``Denominators`` or exact."""
        parts = self.parts(data, fakes, log_z)
        noise = 0.0 if self.reduced else parts.noise
        value = parts.cross_entropy + parts.level + parts.reweighted_prefix_term + noise
        return Loss(value, _metrics(data, fakes, log_z, self._shares(data.mask, fakes.mask)))

    def parts(self, data: Steps, fakes: Steps, log_z: Float[Tensor, " K"]) -> "Parts":
        """Eq. 15 by what each term does."""
        share = self._shares(data.mask, fakes.mask)
        w, x, y = weights(fakes, log_z), self._before(data), self._before(fakes)

        def over(of_data: Tensor | float, of_fakes: Tensor | float) -> Float[Tensor, ""]:
            each = [_mean(v * torch.ones_like(s.logit), s.mask) for v, s in ((of_data, data), (of_fakes, fakes))]
            return (share * (each[1] - each[0])).sum()

        return Parts(
            cross_entropy=over(x + data.log_prob, 0.0),
            level=over(data.log_sum, w * fakes.log_sum),
            reweighted_prefix_term=over(0.0, (w - 1) * y),
            noise=over(0.0, y + w * fakes.log_prob),
        )

    def _before(self, steps: Steps) -> Float[Tensor, "rows K"]:
        """log q̃(x_<k) as far as it has a gradient: Σ of log q(x_l | x_<l) over the last m places l < k."""
        log_prob, total = torch.where(steps.mask, steps.log_prob, 0.0), torch.zeros_like(steps.log_prob)
        for back in range(1, min(self.recent, log_prob.shape[1] - 1) + 1):
            total = total + torch.nn.functional.pad(log_prob[:, :-back], (back, 0))
        return total

    def _shares(self, data: Bool[Tensor, "rows K"], fakes: Bool[Tensor, "fakes K"]) -> Float[Tensor, " K"]:
        """λ_k · (rows that reach k) / tokens; 0 where data or fakes have no row left, as one phase alone diverges."""
        reached = data.sum(0).double()
        lambdas = torch.tensor(self.step_weights or (1.0,) * len(reached)).to(reached)[: len(reached)]
        return torch.where(fakes.any(0), lambdas * reached / reached.sum().clamp(min=1), 0.0)


class Parts(NamedTuple):
    """The terms of Eq. 15, as numbers whose gradients they are."""

    cross_entropy: Float[Tensor, ""]  # −E_x [log q̃(x_<k) + log q(x_k | x_<k)]
    level: Float[Tensor, ""]  # E_y w·S − E_x S: S learns to separate data from fakes
    reweighted_prefix_term: Float[Tensor, ""]  # E_y (w − 1)·log q̃(y_<k): q gives way where S has said it already
    noise: Float[Tensor, ""]  # E_y [log q̃(y_<k) + w·log q(y_k | y_<k)], whose gradient has mean zero


class Sums(NamedTuple):
    """What Z_k is estimated from: Σ e^{S(y_<k)} over fake rows, and how many they are."""

    log_total: Float[Tensor, " K"]
    rows: Int[Tensor, " K"]

    @classmethod
    @torch.no_grad()
    def of(cls, fakes: Steps, length: int) -> "Sums":
        """Of the fake rows of a micro-batch, for ``length`` steps, of which it may have fewer."""
        mask, missing = fakes.mask.cpu(), (0, length - fakes.mask.shape[1])
        log_sum = fakes.log_sum.detach().double().cpu().masked_fill(~mask, -torch.inf)
        pad = torch.nn.functional.pad
        return cls(pad(log_sum.logsumexp(0), missing, value=-torch.inf), pad(mask.sum(0), missing))


@final
class Denominators:
    """log Z_k, averaged over batches.

        Z_k ← d·Z_k + (1 − d)·(mean of e^S over the fake rows),      d = min(decay, n / (n + 1)) at batch n = 0, 1, …

    The mean of one batch divides the same rows that it is a mean of, which biases the gradient; an average
    over batches does so less (section 4 of the paper, after Belghazi et al. 2018). The first few batches count alike. A
    micro-batch sees the average of the steps before and its own rows; the next step's average has those of all.
    """

    def __init__(self, length: int, decay: float) -> None:
        self.length, self.decay = length, decay
        self.log_z = torch.full((length,), -torch.inf, dtype=torch.float64)
        self.seen = torch.zeros(length, dtype=torch.int64)

    def with_rows(self, sums: Sums) -> Float[Tensor, " K"]:
        """log Z_k as it would be with these rows."""
        fresh, n = sums.log_total - sums.rows.double().log(), self.seen.double()
        d = torch.minimum(torch.full_like(n, self.decay), n / (n + 1))
        mixed = torch.logaddexp(d.log() + self.log_z, torch.log1p(-d) + fresh)
        return torch.where(sums.rows > 0, mixed, self.log_z)

    def take(self, sums: Sums) -> None:
        """Adds these rows to the average."""
        self.log_z.copy_(self.with_rows(sums))
        self.seen += (sums.rows > 0).long()

    def update(self, fakes: Steps) -> Float[Tensor, " K"]:
        """Take in a batch; log Z_k for it."""
        self.take(Sums.of(fakes, self.length))
        return self.log_z[: fakes.mask.shape[1]].to(fakes.log_sum)


def weights(fakes: Steps, log_z: Float[Tensor, " K"]) -> Float[Tensor, "rows K"]:
    """w of Eq. 13, without gradient; 0 where a row has ended."""
    return torch.where(fakes.mask, (fakes.log_sum - log_z).detach().exp(), 0.0)


def _mean(values: Float[Tensor, "rows K"], mask: Bool[Tensor, "rows K"]) -> Float[Tensor, " K"]:
    """At each step, over the rows that have it; 0 where none has."""
    return torch.where(mask, values, 0.0).sum(0, dtype=torch.float64) / mask.sum(0).clamp(min=1)


@torch.no_grad()
def _metrics(data: Steps, fakes: Steps, log_z: Float[Tensor, " K"], share: Float[Tensor, " K"]) -> dict[str, float]:
    """``gain`` is E_x S − log Z, what S knows about data, nats; ``effective`` the effective share of the fake rows."""
    w = weights(fakes, log_z)
    total = share.sum().clamp(min=1e-30)
    rows = fakes.mask.sum(0).clamp(min=1)
    effective = w.double().sum(0) ** 2 / (w.double() ** 2).sum(0).clamp(min=1e-300) / rows
    gain = torch.where(share > 0, _mean(data.log_sum, data.mask) - log_z, 0.0)
    return {
        "gain": float((share * gain).sum() / total),
        "effective": float((share * effective).sum() / total),
        "largest_weight": float(w.max()) if w.numel() else 0.0,
    }
