"""Distilling: a copy of the base learns to sample what the residual model would.

    P(x | c) = P_LM(x | c) · e^{−E(c, x)} / Z(c),       x_1 … x_n ~ q(· | c),       w = P_LM · e^{−E} / q
    ∇ KL(P ‖ π) = −E_{x ~ P} ∇ log π(x | c) = −E_{x ~ q} (w/Z) ∇ log π(x | c)  ≈  −Σ_i u_i ∇ log π(x_i | c)
    u_i = w_i/(n·Z),  or with Ẑ(c) = mean w of the same draws  u_i = w_i/Σ_j w_j

This is the distributional policy gradient (Parshakova, Andreoli and Dymetman 2019). With Ẑ of the same draws its mean
is ∇ KL(P_n ‖ π), where P_n is what importance resampling with n candidates writes. The baseline takes out what has mean
zero, since E_{x ~ π} ∇ log π = 0 (Korbak et al. 2022b); all steps then vanish at π = P, at every n from 2 up:

    −Σ_i (u_i − a_i) ∇ log π(x_i | c),      a_i = (π/q)(x_i) / Σ_j (π/q)(x_j)

q starts as the base. Whenever held-out draws of q show that the policy is closer to P, the policy takes its place
(KL-adaptive: Khalifa, Elsahar and Dymetman 2021). Z is not needed for that:

    KL(P ‖ q) − KL(P ‖ π) = E_{x ~ P} [log π(x | c) − log q(x | c)]
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel, Loss
from freenergy.core.scored import Scored
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.corpus import Windows
from freenergy.energies.saving import copied
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.presets import set_dropout
from freenergy.models.residual import Residual
from freenergy.training.checkpoint import restore_weights, save_weights
from freenergy.training.loop import StepRecord, fit_watched
from freenergy.training.settings import Optimisation
from freenergy.training.task import Shuffled, Validation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Distilling:
    """How a policy is trained towards the residual model; ``optimisation.batch_size`` counts the contexts of a step."""

    draws: int = 16  # n, of each context in each step
    baseline: bool = True  # False is the plain policy gradient
    validation_windows: int = 60
    validation_draws: int = 32  # of each new proposal, for each validation window
    measured_draws: int | None = None  # of the result, for each held-out window; None: as many as the base's there
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(
            steps=200, batch_size=8, learning_rate=1e-4, warmup=10, weight_decay=0.0, validate_every=25
        )
    )

    def __post_init__(self) -> None:
        check_range(self, "draws", "validation_draws", "measured_draws", at_least=2)
        check_range(self, "validation_windows", at_least=1)


def shares(log_weight: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """u_i = w_i / Σ_j w_j; a context without any weight has no shares, and counts for nothing."""
    return log_weight.softmax(1).nan_to_num(0.0)


def distil_loss(
    log_pi: Float[Tensor, "B n"],
    log_weight: Float[Tensor, "B n"],
    *,
    log_proposal: Float[Tensor, "B n"] | None = None,
    log_partition: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """The mean over contexts of −Σ_i u_i log π(x_i): its gradient is the policy gradient above.

    With ``log_partition`` the weights are divided by that Z, without it by their own mean. With ``log_proposal`` (log q
    of the draws) the baseline is taken out.
    """
    u = shares(log_weight)
    if log_partition is not None:
        u = (log_weight - log_partition.unsqueeze(1)).exp() / log_weight.shape[1]
    if log_proposal is None:
        return -(u * log_pi).sum(1).mean()
    log_ratio = log_pi - log_proposal
    has_weight = (u > 0).any(1)
    return (log_ratio.logsumexp(1) * has_weight - (u * log_ratio).sum(1)).mean()


class Distances(NamedTuple):
    """How far a model is from P in each context, from draws of a proposal."""

    kl: Float[Tensor, " B"]  # KL(P ‖ model), nats per sequence
    total_variation: Float[Tensor, " B"]


def distances(
    log_model: Float[Tensor, "B n"], log_score: Float[Tensor, "B n"], log_proposal: Float[Tensor, "B n"]
) -> Distances:
    """From draws of q with log P_LM − E (``log_score``), log q, and log-probabilities of a model m.

    KL(P ‖ m) = Σ_i u_i (log_score − log m)(x_i) − log Ẑ        TV(P, m) = ½ mean_i |w_i/Ẑ − (m/q)(x_i)|

    Where the draws are the model's own, the first is log n minus the entropy of the shares: n draws cannot show more
    than log n nats.
    """
    log_weight = log_score - log_proposal
    u, log_z = shares(log_weight), log_weight.logsumexp(1) - math.log(log_weight.shape[1])
    kl = torch.where(u > 0, u * (log_score - log_model), 0.0).sum(1) - log_z
    apart = (log_weight - log_z.unsqueeze(1)).exp() - (log_model - log_proposal).exp()
    return Distances(kl, apart.abs().mean(1) / 2)


class KeptPolicy(NamedTuple):
    """What draws come from: the policy as it was after a step; the base is step 0."""

    step: int
    kl: float  # held-out estimate of KL(P ‖ q), nats per sequence


@final
class Proposals:
    """The base, and every policy that was closer to P when it was validated, in a folder.

    Step s draws from the last one of a step before s. That is a matter of names alone, so steps that are done again
    after a kill draw as they did before.
    """

    def __init__(self, folder: Path, base: HuggingFaceLM, kl_of_base: float) -> None:
        self.folder, self.base, self.first = folder, base, KeptPolicy(0, kl_of_base)
        self._twin: HuggingFaceLM | None = None
        self._filled = 0  # the step whose weights the twin holds

    def last(self, before: int | None = None) -> KeptPolicy:
        """The last proposal, or the last of a step before this one."""
        steps = [step for step in self._steps() if before is None or step < before]
        return KeptPolicy(max(steps), read_json(self._file(max(steps), "json"))["kl"]) if steps else self.first

    def lm(self, proposal: KeptPolicy) -> HuggingFaceLM:
        """The proposal to draw from; it holds until another one is asked for."""
        if not proposal.step:
            return self.base
        if self._twin is None:
            self._twin = HuggingFaceLM(copied(self.base.model), eos=self.base.eos)
        if self._filled != proposal.step:
            restore_weights(self._file(proposal.step, "safetensors"), self._twin.model)
            self._filled = proposal.step
        return self._twin

    def accept(self, step: int, policy: HuggingFaceLM, kl: float) -> None:
        """The policy of this step is the proposal from the next one on."""
        kept = {self.last(before=step).step, step}  # the one before is needed if the steps since then are done again
        save_weights(self._file(step, "safetensors"), policy.model)
        write_json(self._file(step, "json"), {"kl": kl})
        for old in set(self._steps()) - kept:
            self._file(old, "json").unlink()
            self._file(old, "safetensors").unlink()

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.json")]

    def _file(self, step: int, kind: Literal["json", "safetensors"]) -> Path:
        return self.folder / f"{step:07d}.{kind}"


@final
class DistilTask:
    """The policy, for the training loop; ``held_out`` are draws of the base for validation windows."""

    def __init__(
        self,
        model: Residual,
        windows: Windows,
        held_out: Scored,
        space: SequenceSpace,
        settings: Distilling,
        folder: Path,
        rng: Rng,
    ) -> None:
        base, size = network(model.base), settings.optimisation.batch_size
        if len(windows) < size:
            raise UserError(f"there are {len(windows)} training windows but a step takes {size}: take fewer contexts")
        self.model, self.windows, self.space, self.settings, self.rng = model, windows, space, settings, rng
        self.policy = HuggingFaceLM(copied(base.model), eos=base.eos)
        self.module = self.policy.model.requires_grad_(True)
        set_dropout(self.module, 0.0)  # what is scored must be what writes
        of_base = distances(held_out.log_base, held_out.log_base - held_out.energy, held_out.log_proposal)
        self.proposals = Proposals(folder, base, of_base.kl.mean().item())
        self.held_out, self._drawn_at, self._step = held_out, 0, 0
        self._rows = Shuffled(len(windows), settings.optimisation, rng)

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """The policy gradient of one micro-batch, from new draws."""
        self._step = step
        contexts = self.windows.continuations(self._rows(step, micro)).contexts
        found = self._draw(self.proposals.last(before=step), contexts, self.settings.draws, rng)
        log_pi = self.policy.log_prob(found.x).double().cpu()
        log_q = found.log_proposal if self.settings.baseline else None
        value = distil_loss(log_pi, found.log_weight, log_proposal=log_q)
        return Loss(value, {"ess": found.ess.mean().item()})

    def validate(self) -> Validation:
        """KL(P ‖ π) on held-out windows; a policy that is closer than the proposal replaces it."""
        q = self.proposals.last(before=self._step)
        if self._drawn_at != q.step:
            rng = self.rng.child("held-out", q.step)
            self.held_out = self._draw(q, self.held_out.x.contexts, self.settings.validation_draws, rng)
            self._drawn_at = q.step
        log_pi = self.policy.log_prob(self.held_out.x).double().cpu()
        nearer = (shares(self.held_out.log_weight) * (log_pi - self.held_out.log_proposal)).sum(1).mean().item()
        if nearer > 0:
            self.proposals.accept(self._step, self.policy, q.kl - nearer)
        more = {"nearer": nearer, "ess": self.held_out.ess.mean().item(), "is_proposal": float(nearer > 0)}
        return Validation(q.kl - nearer, more)

    @torch.no_grad()
    def _draw(self, proposal: KeptPolicy, contexts: Sequences, num: int, rng: Rng) -> Scored:
        """Draws of a proposal, weighed for P."""
        draws = self.proposals.lm(proposal).sample(contexts, num, self.space, rng)
        log_base = self.model.base.log_prob(draws.x) if proposal.step else draws.log_base
        return self.model.weigh(Draws(draws.x, log_base, draws.log_proposal), law="model")


def network(base: LanguageModel) -> HuggingFaceLM:
    """The base, where it has a network to copy."""
    if not isinstance(base, HuggingFaceLM):
        raise UserError(
            f"distilling tunes a copy of the base's network, and a {type(base).__name__} has none: take a run with a "
            "Hugging Face base"
        )
    return base


def train_policy(task: DistilTask, folder: Path, progress: Progress) -> tuple[HuggingFaceLM, KeptPolicy]:
    """Trains, or resumes training, in ``folder``; returns the policy that was closest to P, or else the base."""

    def line(record: StepRecord) -> str:
        before, now = task.proposals.first.kl, task.proposals.last().kl
        return f"effective {record.metrics['ess']:.1f} of {task.settings.draws} draws, KL {before:.2f} → {now:.2f} nats"

    fit_watched(task, task.settings.optimisation, folder, task.rng, progress, "distilling", line)
    found = task.proposals.last()
    return task.proposals.lm(found), found
