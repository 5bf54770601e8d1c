"""Gibbs sampling: tokens drawn from their full conditionals.

    x_A ~ P(x_A | x_{≠A}) ∝ exp log_score(x),      A one site, or ``block`` neighbouring sites: V^block scores

Random scan: one block per step. Systematic scan: a step is a sweep over all blocks from left to right, P = B_1 B_2 …,
which leaves P invariant and is not reversible. A Metropolised draw (Liu 1996) proposes a value other than the present,

    v ~ P(v | ·) / (1 − P(x_t | ·)) for v ≠ x_t,        accepted with min(1, (1 − P(x_t | ·)) / (1 − P(v | ·)))

and is never worse at the same cost. Where texts may end early the length stays, as for every kernel of sites.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.samplers.kernels.sites import log_scores, num_sites, random_site, site_scores, token_at, with_token

_MAX_VALUES = 100_000


@final
@dataclass(frozen=True, slots=True)
class GibbsState:
    """Where the chains are."""

    x: Continuations  # [1, chains]


@final
@dataclass(frozen=True, slots=True)
class GibbsInfo:
    """What one step did: a plain draw is always taken, a Metropolised one can be refused."""

    is_accepted: Bool[Tensor, " chains"]
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gibbs:
    """Full conditionals; ``scan`` says of which sites, ``block`` of how many together."""

    scan: Literal["random", "systematic"] = "random"
    block: int = 1
    metropolised: bool = False

    def __post_init__(self) -> None:
        check_range(self, "block", at_least=1)
        if self.metropolised and self.block > 1:
            raise UserError("metropolised draws are of single sites: set block to 1, or metropolised to false")

    def init(self, target: Target[Model], x: Continuations) -> GibbsState:
        """Start chains at given positions [1, chains]."""
        if target.space.vocab_size**self.block > _MAX_VALUES:
            raise UserError(
                f"a block of {self.block} sites has {float(target.space.vocab_size) ** self.block:.1e} values: "
                "lower block, or propose by the base (single-site)"
            )
        return GibbsState(x)

    def step(self, target: Target[Model], state: GibbsState, rng: Rng) -> tuple[GibbsState, GibbsInfo]:
        """Draw one block of every chain, or all blocks in turn."""
        x, L = state.x, state.x.tokens.shape[2]
        if self.scan == "random":
            site = random_site(x, target.space, rng.child("site").rows(1, x.shape[1], 1))
            x, taken = self._draw(target, x, site // self.block * self.block, rng)
            return GibbsState(x), GibbsInfo(taken, 0)
        moved = torch.zeros(x.shape[1], dtype=torch.bool)
        for i in range(0, L, self.block):
            site = torch.where(num_sites(x, target.space) > i, i, -1)
            x, taken = self._draw(target, x, site, rng.child("sweep", i))
            moved |= taken
        return GibbsState(x), GibbsInfo(moved, 0)

    def _draw(
        self, target: Target[Model], x: Continuations, site: Int[Tensor, " chains"], rng: Rng
    ) -> tuple[Continuations, Bool[Tensor, " chains"]]:
        if self.block > 1:
            return self._draw_block(target, x, site, rng)
        log_p, rows, old = site_scores(target, x, site), rng.child("draw").rows(1, x.shape[1], 2), token_at(x, site)
        if not self.metropolised:
            token = rows.categorical(log_p.unsqueeze(0))[0]
            return with_token(x, site, token), torch.ones(len(site), dtype=torch.bool)
        others = log_p.scatter(1, old.unsqueeze(1), -torch.inf)
        is_stuck = (others == -torch.inf).all(1)  # no other value has any mass
        token = rows.categorical(torch.where(is_stuck.unsqueeze(1), log_p, others).unsqueeze(0))[0]
        log_r = others.logsumexp(1) - log_p.scatter(1, token.unsqueeze(1), -torch.inf).logsumexp(1)
        r = torch.where(is_stuck, 0.0, log_r.nan_to_num(nan=0.0).clamp(max=0).exp())
        coins = torch.stack([torch.log1p(-r), r.log()], dim=-1)
        taken = rows.categorical(coins.unsqueeze(0))[0].bool()
        return with_token(x, site, torch.where(taken, token, old)), taken

    def _draw_block(
        self, target: Target[Model], x: Continuations, site: Int[Tensor, " chains"], rng: Rng
    ) -> tuple[Continuations, Bool[Tensor, " chains"]]:
        """Draw several neighbouring sites together; a block stops at the last site."""
        values = self._values(target)
        scores = torch.stack([self._score(target, x, site, value) for value in values], dim=1)
        which = rng.child("draw").rows(1, x.shape[1], 1).categorical(scores.unsqueeze(0))[0]
        return _with_block(x, site, values[which], num_sites(x, target.space)), torch.ones(len(site), dtype=torch.bool)

    def _values(self, target: Target[Model]) -> Int[Tensor, "values block"]:
        tokens = [v for v in range(target.space.vocab_size) if v != target.space.eos]
        return torch.tensor(list(product(tokens, repeat=self.block)))

    def _score(self, target: Target[Model], x: Continuations, site: Tensor, value: Tensor) -> Float[Tensor, " chains"]:
        K, count = len(site), num_sites(x, target.space)
        written = _with_block(x, site, value.expand(K, -1), count)
        scores = log_scores(target, written)
        # values that differ only behind the last site are one value: the first of them counts
        behind = (site.unsqueeze(1) + torch.arange(self.block)) >= count.unsqueeze(1)
        first = value.new_tensor(min(v for v in range(target.space.vocab_size) if v != target.space.eos))
        return torch.where((behind & (value != first)).any(1), -torch.inf, scores)


def _with_block(
    x: Continuations, site: Int[Tensor, " chains"], values: Int[Tensor, "chains block"], count: Int[Tensor, " chains"]
) -> Continuations:
    for i in range(values.shape[1]):
        place = torch.where((site >= 0) & (site + i < count), site + i, -1)
        x = with_token(x, place, values[:, i])
    return x
