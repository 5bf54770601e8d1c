"""Metropolis within Gibbs by word classes: a class from a cheap model, then the word exactly within it.

    t ~ Uniform(sites),   c' ~ q(· | c, x_<t),   r = min(1, S(c') q(c) / (S(c) q(c'))),   c ← c' with probability r
    v ~ exp log_score(x with x_t = v) / S(c) over the words of c,        S(c) = Σ_{v in c} exp log_score(x with x_t = v)

q is what the base predicts from the left, added up by class. The word is redrawn within its class whether or not the
class has changed. A step reads the energy of two classes of words instead of V: |c| + |c'|, about 2√V with √V classes.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.models.residual import residual_of
from freenergy.samplers.accept import accept, acceptance
from freenergy.samplers.kernels.metropolis_hastings import MetropolisHastingsInfo, MetropolisHastingsState
from freenergy.samplers.kernels.proposals import causal_log_probs
from freenergy.samplers.kernels.sites import log_scores, random_site, token_at, with_token, without_eos, written_scores


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassSite:
    """``classes`` has the class of every token, 0 … C − 1."""

    classes: Int[Tensor, " V"]

    def init(self, target: Target[Model], x: Continuations) -> MetropolisHastingsState:
        """Start chains at given positions [1, chains]."""
        if len(self.classes) != target.space.vocab_size:
            raise UserError(
                f"{len(self.classes)} tokens have a class, but there are {target.space.vocab_size}: give each one"
            )
        return MetropolisHastingsState(x, log_scores(target, x))

    def step(
        self, target: Target[Model], state: MetropolisHastingsState, rng: Rng
    ) -> tuple[MetropolisHastingsState, MetropolisHastingsInfo]:
        """Choose a class for one site of every chain, and a word in it."""
        x, K = state.x, state.x.shape[1]
        rows = rng.child("draw").rows(1, K, 3)
        site = random_site(x, target.space, rows)
        old = self.classes[token_at(x, site)]
        log_q = self._class_log_probs(target, x, site)
        new = torch.where(site < 0, old, rows.categorical(log_q.unsqueeze(0))[0])
        words = {"old": self._words(target, x, site, old), "new": self._words(target, x, site, new)}
        mass = {name: own.logsumexp(1) for name, own in words.items()}
        q_old, q_new = log_q.gather(1, torch.stack([old, new], dim=1)).unbind(1)
        log_ratio = mass["new"] - mass["old"] + q_old - q_new
        r = acceptance(torch.where((mass["old"] == -torch.inf) | (old == new), 0.0, log_ratio))
        is_accepted = accept(r, rng.child("accept"))
        scores = torch.where(is_accepted.unsqueeze(1), words["new"], words["old"])
        token = rows.categorical(scores.unsqueeze(0))[0]
        after = torch.where(site < 0, state.log_score, scores.gather(1, token.unsqueeze(1)).squeeze(1))
        everyone = torch.ones(K, dtype=torch.bool)  # the word is redrawn in any case
        return MetropolisHastingsState(with_token(x, site, token), after), MetropolisHastingsInfo(everyone, r, K)

    def _class_log_probs(self, target: Target[Model], x: Continuations, site: Tensor) -> Float[Tensor, "chains C"]:
        p = without_eos(causal_log_probs(residual_of(target).base, x, site), target.space).exp()
        C = int(self.classes.max()) + 1
        return torch.zeros(len(site), C, dtype=p.dtype).index_add(1, self.classes, p).log()

    def _words(self, target: Target[Model], x: Continuations, site: Tensor, c: Tensor) -> Float[Tensor, "chains V"]:
        """log_score with every word of the chain's class at its site; −inf elsewhere."""
        inside = self.classes.unsqueeze(0) == c.unsqueeze(1)
        if target.space.eos is not None:
            inside[:, target.space.eos] = False
        inside &= (site >= 0).unsqueeze(1)
        inside |= (site < 0).unsqueeze(1) & (torch.arange(len(self.classes)) == token_at(x, site).unsqueeze(1))
        chain, token = inside.nonzero().unbind(1)
        scores = torch.full(inside.shape, -torch.inf, dtype=torch.float64)
        scores[chain, token] = written_scores(target, x, chain, site[chain], token)
        return scores
