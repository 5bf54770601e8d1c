"""Top-k autoregressive sampling: token by token, each step's probabilities from roll-outs (section A.1 of Deng et al.).

    x_t = v with probability â_v / Σ_u â_u,      â_v = q(v | c, x_<t) · Ẑ(c, x_<t v),      v, u in the top k of P_LM
    Ẑ(c, x_<t v) = (1/m) Σ_j w(x_<t v y_j),      y_j ~ q(· | c, x_<t v)

q is P_LM restricted to its top k tokens at every step, in the roll-outs too: else steps would count futures that no
later step can write. At a finite m a step's law is the mean of a ratio, which is not the ratio of means. With
y_j = q(v) w_j / Σ_u a_u, whose mean is P(v), Jensen's inequality over all completions but one bounds the distance:

    E[P̂(v)] ≥ E[y / (1 + (y − P(v))/m)],      TV(step) ≤ Σ_v (P(v) − E[y / (1 + (y − P(v))/m)])⁺ = O(1/m)
    TV(text) ≤ Σ_t E[TV(step t)],   over the texts that are written;   estimated from the same completions

It is expensive, about k · m · L²/2 tokens of the base per text, and there to show how each token was chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Advance, Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.models.residual import Residual, relative_to_base
from freenergy.partition.estimate import LARGE_SHARE
from freenergy.partition.exact import after
from freenergy.partition.next_token import first_given
from freenergy.samplers.sampled import SILENT, Sampled, check_call


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Autoregressive:
    """Texts token by token, each token chosen among ``top_k`` by ``completions`` roll-outs of each."""

    top_k: int = 10
    completions: int = 16
    law: Law = "restricted"
    batch_size: int = 128  # completions in one call of the models

    def __post_init__(self) -> None:
        check_range(self, "top_k", "completions", "batch_size", at_least=1)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Write token by token."""
        check_call(target, num)
        own, L = relative_to_base(target), target.space.length
        cost = self.cost(target.space, num)
        progress.say(
            f"token by token takes up to {cost:,} tokens of the base, as many as resampling among "
            f"{max(1, cost // (num * L)):,} candidates"
        )
        with progress.track("writing", num * L, "tokens") as advance:
            texts = [self._text(own, rng.child("text", r), advance) for r in range(num)]
        return Sampled(
            x=Continuations.from_lists(target.contexts.lists(), [[[step.token for step in text] for text in texts]]),
            log_base=torch.tensor([[sum(step.log_base for step in text) for text in texts]], dtype=torch.float64),
            energy=torch.tensor([[text[-1].energy for text in texts]], dtype=torch.float64),
            method="autoregressive",
            law=self.law,
            distance=min(1.0, sum(sum(step.distance for step in text) for text in texts) / num),
            is_estimated=True,
            base_tokens=sum(step.base_tokens for text in texts for step in text),
            notes=_notes([step for text in texts for step in text]),
        )

    def cost(self, space: SequenceSpace, num: int = 1) -> int:
        """Tokens that the base draws, at most."""
        L = space.length
        return num * min(self.top_k, space.vocab_size) * self.completions * L * (L - 1) // 2

    def _text(self, target: Target[Residual], rng: Rng, advance: Advance) -> "list[_Step]":
        steps: list[_Step] = []
        space = target.space
        for t in range(space.length):
            left, head = replace(space, length=space.length - t), [step.token for step in steps]
            steps.append(self._step(target.within(left), head, rng.child("step", t)))
            advance(1)
            if steps[-1].token == space.eos:
                break
        return steps

    def _step(self, left: Target[Residual], head: Sequence[int], rng: Rng) -> "_Step":
        """Choose one token; ``left`` is the target with what is left of the space."""
        base = left.model.base
        read = after(left.contexts, torch.tensor([list(head)], dtype=torch.long), base.eos)
        log_p = base.next_log_probs(read)[0].double().cpu()
        log_q = Truncation(top_k=self.top_k)(log_p)
        top = (log_q > -torch.inf).nonzero().flatten()
        m = self.completions if left.space.length > 1 else 1  # the last token needs no ending
        first = top.repeat_interleave(m)
        log_w, E, tokens = self._rolled_out(left, head, first, rng.child("draw"))
        log_a = log_q[top].unsqueeze(1) + log_w.view(len(top), m)
        if (log_a == -torch.inf).all():
            raise UserError(
                f"no candidate is acceptable: all {len(first)} completions of token {len(head)} have a weight of zero "
                "(an energy of +inf); take more completions, or look at the energy"
            )
        chosen = int(rng.child("choose").categorical(log_a.logsumexp(1)))
        return _Step(
            token=int(top[chosen]),
            log_base=float(log_p[top[chosen]]),
            energy=float(E[chosen * m]),  # of the whole text, where the token ends it
            distance=0.0 if left.space.length == 1 else step_distance(log_a),
            base_tokens=tokens,
            is_uneven=m > 1 and float(log_a.flatten().softmax(0).max()) > LARGE_SHARE,
        )

    def _rolled_out(
        self, left: Target[Residual], head: Sequence[int], first: Int[Tensor, " N"], rng: Rng
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], int]:
        """Return log w and E of a completion of each first token, and the number of tokens drawn."""
        truncation, log_w, E, tokens = Truncation(top_k=self.top_k), [], [], 0
        for n in range(0, len(first), self.batch_size):
            some, stream = first[n : n + self.batch_size], rng.shift(candidates=n)
            draws = first_given(left, head, some, stream, truncation)
            found = left.model.weigh(draws, truncation=truncation, law=self.law, batch_size=self.batch_size)
            log_w.append(found.log_weight[0])
            E.append(found.energy[0])
            tokens += int(draws.x.lengths.sum()) - len(some) * (len(head) + 1)
        return torch.cat(log_w), torch.cat(E), tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    token: int
    log_base: float
    energy: float
    distance: float
    base_tokens: int
    is_uneven: bool  # one completion carries most of the weight


def step_distance(log_a: Float[Tensor, "k m"]) -> float:
    """The bound on a step's total variation above, with log(q(v) w_j) of m completions standing for their law.

    One completion per token says nothing about how completions differ: the distance is then at most 1.

    >>> step_distance(torch.zeros(3, 2)), step_distance(torch.zeros(3, 1))
    (0.0, 1.0)
    """
    k, m = log_a.shape
    if k == 1:
        return 0.0  # only one token can be chosen
    if m == 1:
        return 1.0
    y = (log_a - log_a.flatten().logsumexp(0) + math.log(m)).exp()
    P = y.mean(1, keepdim=True)
    below = (y / (1 + (y - P) / m)).mean(1, keepdim=True)
    return float((P - below).clamp(min=0).sum())


def _notes(steps: Sequence[_Step]) -> tuple[str, ...]:
    uneven = sum(step.is_uneven for step in steps)
    note = (
        f"the text follows its target only roughly: at {uneven} of {len(steps)} tokens one completion carries most of "
        "the weight; take more completions"
    )
    return (note,) if uneven else ()
