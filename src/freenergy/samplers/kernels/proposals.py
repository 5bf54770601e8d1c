"""Proposals for Metropolis–Hastings on texts: one token, or everything from some place on.

    Site:      t ~ Uniform(sites),  v ~ q(· | x_{≠t}),  x' = x with x_t = v;      log ratio = log q(x_t) − log q(v)
               uniform   q(v) = 1/V
               causal    q(v) = P_LM(v | c, x_<t):                         what stands before it
               cloze     q(v) ∝ P_LM(x with x_t = v | c):                  the base on both sides, V readings of it
               masked    q(v) = a masked language model's guess for t
    Suffix:    t ~ Uniform{0 … L − 1},  x'_{≥t} ~ P_LM(· | c, x_<t);       log ratio = log P_LM(x) − log P_LM(x')

Neither t nor the law of v depends on the token that is replaced. Under ``Suffix`` nothing happens where t is behind the
end; what is kept has the same probability on both sides, so it cancels.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.rng import Rng, Streams
from freenergy.core.roles import LanguageModel, Model, Target
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.sample_only import relative_log_prob
from freenergy.models.residual import Residual, residual_of
from freenergy.samplers.kernels.metropolis_hastings import Proposed
from freenergy.samplers.kernels.sites import random_site, site_scores, token_at, with_token, without_eos


@runtime_checkable
class Filler(Protocol):
    """A masked language model: what could stand at one place, given everything around it."""

    def fill_log_probs(self, x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "chains V"]:
        """log q(v | c, x without x_t) for every token v; must not depend on x_t."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Another token at a random site; ``temperature`` flattens what the base proposes for it."""

    by: Literal["uniform", "causal", "cloze"] = "causal"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)

    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Choose a site and a token for each chain."""
        rows = rng.rows(1, x.shape[1], 2)
        site = random_site(x, target.space, rows)
        log_q = self._log_q(target, x, site)
        return _written(target, x, site, log_q, rows.categorical(log_q.unsqueeze(0))[0])

    def _log_q(self, target: Target[Model], x: Continuations, site: Tensor) -> Float[Tensor, "chains V"]:
        K, V = len(site), target.space.vocab_size
        if self.by == "uniform":
            log_q = torch.zeros(K, V, dtype=torch.float64)
        elif self.by == "causal":
            log_q = causal_log_probs(residual_of(target).base, x, site)
        else:
            base = Target(Residual(residual_of(target).base), target.contexts, target.space)
            log_q = site_scores(base, x, site)
        return without_eos(Truncation(temperature=self.temperature)(without_eos(log_q, target.space)), target.space)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSite:
    """Another token at a random site, guessed by a masked language model."""

    filler: Filler

    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Choose a site and a token for each chain."""
        rows = rng.rows(1, x.shape[1], 2)
        site = random_site(x, target.space, rows)
        log_q = without_eos(self.filler.fill_log_probs(x, site.clamp(min=0)).double().cpu(), target.space)
        return _written(target, x, site, log_q, rows.categorical(log_q.unsqueeze(0))[0])


def _written(target: Target[Model], x: Continuations, site: Tensor, log_q: Tensor, token: Tensor) -> Proposed:
    token = torch.where(site < 0, token_at(x, site), token)
    chosen = torch.stack([token_at(x, site), token], dim=1)
    old, new = log_q.gather(1, chosen).unbind(1)
    return Proposed(with_token(x, site, token), torch.where(site < 0, 0.0, old - new), len(site))


def causal_log_probs(base: LanguageModel, x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "chains V"]:
    """log P_LM(· | c, x_<t) at the site of each chain."""
    context = x.contexts.lists()[0] or [base.eos]
    heads = [context + tokens[: max(t, 0)] for tokens, t in zip(x.lists()[0], site.tolist(), strict=True)]
    return base.next_log_probs(Sequences.from_lists(heads)).double().cpu()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """Everything from a random place on, redrawn from the base."""

    @torch.no_grad()
    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Choose a place for each chain and draw what follows it; chains that keep the same number go together."""
        base, space, K = residual_of(target).base, target.space, x.shape[1]
        cut = rng.child("place").rows(1, K, 1).categorical(torch.zeros(1, K, space.length))[0]
        tokens = torch.nn.functional.pad(x.tokens, (0, space.length - x.tokens.shape[2]))[0].clone()
        lengths, drawn = x.lengths[0].clone(), 0
        for t in cut.unique().tolist():
            some = ((cut == t) & (x.lengths[0] > t)).nonzero().flatten()
            if len(some):
                ends = _endings(base, x.candidates(some), t, space, rng.child("tokens"), some)
                tokens[some, t:] = torch.nn.functional.pad(
                    ends.tokens[:, 0], (0, space.length - t - ends.tokens.shape[2])
                )
                lengths[some] = ends.lengths[:, 0] + t
                drawn += int(ends.lengths.sum())
        moved = Continuations(x.contexts, tokens.unsqueeze(0), lengths.unsqueeze(0))
        return Proposed(moved, (relative_log_prob(base, x) - relative_log_prob(base, moved))[0], drawn)


def _endings(
    base: LanguageModel, x: Continuations, t: int, space: SequenceSpace, rng: Rng, chains: Int[Tensor, " n"]
) -> Continuations:
    """Draw one ending after the first t tokens of each chain; chain n draws from candidate n of the stream."""
    context = x.contexts.lists()[0] or [base.eos]
    heads = Sequences.from_lists([context + tokens[:t] for tokens in x.lists()[0]])
    streams = Streams([rng.shift(candidates=int(n)) for n in chains])
    rest = SequenceSpace(vocab_size=space.vocab_size, length=space.length - t, eos=space.eos)
    return base.sample(heads, 1, rest, streams).x.to("cpu")
