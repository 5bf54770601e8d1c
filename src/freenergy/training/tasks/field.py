"""Training a random field by chains or by noise: all methods of the book's table, as one task of the training loop.

    likelihood   ∇ = E_data ∇U − E_model ∇U
      sml        E_model by persistent chains (stochastic maximum likelihood, PCD)
      cd         E_model by chains that start at the data of the step: another fixed point, not the likelihood's
      augsa      chains over all lengths, target π_l e^{U − ζ_l}; ζ_l += γ (share of chains at l − π_l) / π_l
      jsa        sml whose proposal learns too: q climbs E_chains log q, the inclusive divergence
      snis       E_model by weights of fresh draws of q, self-normalised
    noise        logit = U − ζ − log q
      nce        q fixed;  J = E_data log σ(logit − log ν) + ν E_q log σ(log ν − logit)
      dnce       q learns by likelihood in the same step; data are mixed with draws of q, α data + (1 − α) q

With q fixed the optimum of dnce is α p_data + (1 − α) q, and not p_data; ``unmixed`` undoes that. Chains move by any
``Kernel``; their positions are the task's state, so a killed training resumes with the same bits. Weights are averaged
over steps (``Optimisation.ema``), which is worth several times the chains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from freenergy.core.checks import check_range
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Kernel, LanguageModel, Loss, Target
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.samplers.kernels.independence import Independence
from freenergy.training.settings import Optimisation
from freenergy.training.task import Validation

Methods = Literal["sml", "cd", "augsa", "jsa", "snis", "nce", "dnce"]
_CHAINS = ("sml", "cd", "augsa", "jsa")
EMPTY = Sequences.from_lists([[]])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldMethod:
    """How a field is trained by chains or noise."""

    method: Methods = "sml"
    moves: int = 1  # of every chain in a step
    noise_ratio: int = 1  # ν of nce, dnce; draws per datum of snis
    alpha: float = 0.5  # share of data among the positives of dnce
    zeta_rate: float = 0.1  # γ of augsa at the first step; it falls as 1/t after a third of the steps
    l2: float = 0.0  # λ/2 |θ|² is added, with θ all weights

    def __post_init__(self) -> None:
        check_range(self, "moves", "noise_ratio", at_least=1)
        check_range(self, "alpha", above=0, at_most=1)
        check_range(self, "zeta_rate", "l2", at_least=0)


def averaged(steps: int, batch_size: int, learning_rate: float) -> Optimisation:
    """Return steps of Adam whose weights are averaged over the last tenth of the steps, as these methods need it."""
    return Optimisation(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, weight_decay=0.0, warmup=0, clip=0.0,
        ema=max(0.0, 1 - 10 / steps), validate_every=max(1, steps // 5), checkpoint_seconds=10.0,
    )  # fmt: skip


class _Lengths(nn.Module):
    """The field with its constants: ζ (one, or one per length)."""

    def __init__(self, field: nn.Module, noise: nn.Module | None, num: int) -> None:
        super().__init__()
        self.field, self.noise = field, noise
        self.zeta = nn.Parameter(torch.zeros(num, dtype=torch.float64))


@final
class _Tilted:
    """log π_l + U − ζ_l: what the chains of augsa follow."""

    def __init__(self, field: Any, shift: Float[Tensor, " m"]) -> None:
        self._field, self._shift = field, shift

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        place = (x.lengths - 2).clamp(min=0, max=len(self._shift) - 1)
        found: Tensor = self._field.log_score(x).detach() + self._shift[place]
        return found


@final
class FieldTask:
    """A random field, its data [1, N], a noise model and chains; plays ``Task`` and ``Stateful``.

    ``field`` has ``log_score(x)`` with gradients. ``log_lengths`` is log π, and with it ζ has one number per length.
    """

    def __init__(
        self,
        field: nn.Module,
        data: Continuations,
        noise: LanguageModel,
        settings: FieldMethod,
        optimisation: Optimisation,
        space: SequenceSpace,
        *,
        kernel: Kernel[Any] | None = None,
        chains: int = 100,
        log_lengths: Float[Tensor, " m"] | None = None,
        measure: Callable[[nn.Module], float] | None = None,
        rng: Rng | None = None,
    ) -> None:
        self.field, self.data, self.noise, self.settings, self.space = field, data, noise, settings, space
        self.steps, self.log_lengths, self._measure = optimisation, log_lengths, measure
        self.kernel: Kernel[Any] = kernel or Independence()
        learns = settings.method in ("dnce", "jsa")
        own = noise if learns and isinstance(noise, nn.Module) else None
        self._module = _Lengths(field, own, 1 if log_lengths is None else len(log_lengths))
        self._size = optimisation.batch_size // optimisation.accumulate
        self._target = Target(field, EMPTY, space, noise)  # type: ignore[type-var]
        self._state: dict[str, Tensor] = {}
        if settings.method in _CHAINS and settings.method != "cd":
            at = self._draws(chains, (rng or Rng()).child("chains")).x
            width = space.length - at.tokens.shape[2]
            tokens = torch.nn.functional.pad(at.tokens[0], (0, width))
            self._state = {"tokens": tokens.clone(), "lengths": at.lengths[0].clone()}

    @property
    def module(self) -> nn.Module:
        """The field, the noise where it learns, and ζ."""
        return self._module

    @property
    def state(self) -> dict[str, Tensor]:
        """The positions of persistent chains."""
        return self._state

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Keep where the chains have come; move ζ of augsa towards equal visits."""
        if not self._state:
            return
        for name, kept in self._state.items():
            kept.copy_(statistics[name][-1].to(kept.dtype))
        if self.settings.method == "augsa" and self.log_lengths is not None:
            share = torch.bincount(self._state["lengths"] - 1, minlength=len(self.log_lengths) + 1)[1:]
            pi, hot = self.log_lengths.exp(), max(1, self.steps.steps // 3)
            rate = self.settings.zeta_rate * min(1.0, hot / step)
            with torch.no_grad():
                self._module.zeta.add_(rate * (share / share.sum() - pi) / pi.clamp(min=1e-3))
                self._module.zeta.sub_(self._module.zeta[0].clone())

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Returns the loss of one micro-batch, whose gradient is the method's."""
        rows = rng.child("data").permutation(self.data.shape[1])[: self._size]
        data = self.data.candidates(rows)
        found = self._of_chains(data, rng) if self.settings.method in _CHAINS else self._of_noise(data, rng)
        if self.settings.l2:
            weights = sum((weight.square().sum() for weight in self.field.parameters()), torch.zeros(()))
            found = Loss(found.value + self.settings.l2 / 2 * weights, found.metrics, found.statistics)
        return found

    def validate(self) -> Validation:
        """Measures the field on held-out data, by what was given for that."""
        return Validation(self._measure(self.field) if self._measure is not None else 0.0)

    def _of_chains(self, data: Continuations, rng: Rng) -> Loss:
        x, accepted = self._moved(data, rng)
        value = self._score(x).mean() - self._score(data).mean()
        metrics = {"acceptance": accepted}
        if self.settings.method == "jsa":
            learned = self._log_noise(x).mean()
            value, metrics["log_noise"] = value - learned, float(learned.detach())
        width = self.space.length - x.tokens.shape[2]
        tokens = torch.nn.functional.pad(x.tokens[0], (0, width))
        return Loss(value, metrics, {"tokens": tokens.double(), "lengths": x.lengths[0].double()})

    @torch.no_grad()
    def _moved(self, data: Continuations, rng: Rng) -> tuple[Continuations, float]:
        """Return the positions of the chains after this step's moves."""
        start = data
        if self._state:
            tokens, lengths = self._state["tokens"].long(), self._state["lengths"].long()
            start = Continuations(EMPTY, tokens.unsqueeze(0), lengths.unsqueeze(0))
        target: Any = self._target
        if self.settings.method == "augsa" and self.log_lengths is not None:
            target = Target(_Tilted(self.field, self.log_lengths - self._module.zeta), EMPTY, self.space, self.noise)
        state, moved = self.kernel.init(target, start), 0.0
        for move in range(self.settings.moves):
            state, info = self.kernel.step(target, state, rng.child("move", move))
            moved += float(info.is_accepted.double().mean()) / self.settings.moves
        return state.x, moved

    def _of_noise(self, data: Continuations, rng: Rng) -> Loss:
        draws = self._draws(self.settings.noise_ratio * data.shape[1], rng.child("noise"))
        score, log_q = self._score(draws.x), draws.log_base
        if self.settings.method == "snis":
            log_weight = score - log_q
            value = log_weight.logsumexp(1).mean() - math.log(log_weight.shape[1]) - self._score(data).mean()
            share = (2 * log_weight.logsumexp(1) - (2 * log_weight).logsumexp(1)).exp() / log_weight.shape[1]
            return Loss(value, {"effective": float(share.detach())})
        return self._contrast(data, draws, rng)

    def _contrast(self, data: Continuations, draws: Draws, rng: Rng) -> Loss:
        """Binary noise contrast; of dnce with mixed positives, and with the noise's own likelihood."""
        log_nu, zeta = math.log(self.settings.noise_ratio), self._zeta
        positive = self._score(data) - zeta(data) - self._log_noise(data).detach()
        negative = self._score(draws.x) - zeta(draws.x) - draws.log_base
        value = -logsigmoid(positive - log_nu).mean()
        metrics = {"zeta": float(self._module.zeta.detach().mean())}
        if self.settings.method == "dnce":
            alpha = self.settings.alpha
            more = self._draws(data.shape[1], rng.child("positives"))
            mixed = self._score(more.x) - zeta(more.x) - more.log_base
            value = alpha * value - (1 - alpha) * logsigmoid(mixed - log_nu).mean()
            learned = self._log_noise(data).mean()
            value, metrics["log_noise"] = value - learned, float(learned.detach())
        value = value - self.settings.noise_ratio * logsigmoid(log_nu - negative).mean()
        return Loss(value, metrics)

    def _score(self, x: Continuations) -> Float[Tensor, "B N"]:
        found: Tensor = self.field.log_score(x)  # type: ignore[operator]
        return found

    def _zeta(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Return ζ of each string, less log π where lengths have constants of their own."""
        if self.log_lengths is None:
            return self._module.zeta.expand(x.shape)
        place = (x.lengths - 2).clamp(min=0, max=len(self.log_lengths) - 1)
        return (self._module.zeta - self.log_lengths)[place]

    def _log_noise(self, x: Continuations) -> Float[Tensor, "B N"]:
        return self.noise.log_prob(x)

    @torch.no_grad()
    def _draws(self, num: int, rng: Rng) -> Draws:
        """Draw strings of the field's space that end; others are drawn again, which adds a constant to ζ."""
        parts, have, turn = list[Draws](), 0, 0
        while have < num:
            drawn = self.noise.sample(EMPTY, 2 * num, self.space, rng.child("turn", turn))
            last = drawn.x.tokens.gather(2, (drawn.x.lengths - 1).unsqueeze(-1)).squeeze(-1)
            kept = ((last == self.space.eos) & (drawn.x.lengths > 1))[0].nonzero().flatten()[: num - have]
            parts.append(Draws(drawn.x.candidates(kept), drawn.log_base[:, kept], drawn.log_proposal[:, kept]))
            have, turn = have + len(kept), turn + 1
        return Draws.cat(parts, dim=1)


def unmixed(log_ratio: Float[Tensor, "..."], alpha: float, least: float = 0.05) -> Float[Tensor, "..."]:
    """Return log p / q from the log p_int / q that dnce learns with a fixed q: (r − (1 − α)) / α, at least ``least``.

    >>> unmixed(torch.tensor([1.0]).log(), 0.5).exp()
    tensor([1.])
    """
    return ((log_ratio.exp() - (1 - alpha)) / alpha).clamp(min=least).log()
