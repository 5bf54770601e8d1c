"""What kernels that change single tokens share: where they may, and what the model says of every token there.

    sites of x = 0 … l − 1, without a final EOS;      scores(v) = log_score(x with x_t = v)

A move never writes or removes EOS, so the length of a text stays; how many sites there are depends on the length alone.
In a space of one length such a kernel reaches everything; elsewhere put it next to one that redraws whole texts.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rows
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations, SequenceSpace

_STRINGS = 8192  # scored in one call of the model


@runtime_checkable
class SiteModel(Protocol):
    """A model that scores all tokens at one site faster than by V whole texts."""

    def site_scores(self, x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "chains V"]:
        """log_score(x with x_t = v) for every v, up to a constant per chain."""


@torch.no_grad()
def log_scores(target: Target[Model], x: Continuations) -> Float[Tensor, " chains"]:
    """The unnormalised log-density of each chain's position, float64 on the CPU."""
    found = target.model.log_score(x)[0].double().cpu()
    if found.isnan().any() or (found == torch.inf).any():
        n = int((found.isnan() | (found == torch.inf)).nonzero()[0])
        raise UserError(f"the log_score of chain {n} is {found[n].item()}: look at the energy of that text")
    return found


def num_sites(x: Continuations, space: SequenceSpace) -> Int[Tensor, " chains"]:
    """How many tokens of each chain may change."""
    if space.eos is None:
        return x.lengths[0]
    last = x.tokens[0].gather(1, (x.lengths[0] - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return x.lengths[0] - (last == space.eos).long()


def random_site(x: Continuations, space: SequenceSpace, rows: Rows) -> Int[Tensor, " chains"]:
    """Choose one site per chain evenly; −1 where a text has none."""
    count, L = num_sites(x, space), x.tokens.shape[2]
    is_site = torch.arange(L) < count.unsqueeze(1)
    is_site[:, 0] |= count == 0
    chosen = rows.categorical(torch.where(is_site, 0.0, -torch.inf).unsqueeze(0))[0]
    return torch.where(count == 0, -1, chosen)


def token_at(x: Continuations, site: Int[Tensor, " chains"]) -> Int[Tensor, " chains"]:
    """The token of each chain at its site; that of the first place where there is no site."""
    return x.tokens[0].gather(1, site.clamp(min=0).unsqueeze(1)).squeeze(1)


def with_token(x: Continuations, site: Int[Tensor, " chains"], token: Int[Tensor, " chains"]) -> Continuations:
    """Write a token at the site of each chain; chains without a site stay as they are."""
    own = torch.where(site < 0, token_at(x, site), token)
    tokens = x.tokens.scatter(2, site.clamp(min=0).view(1, -1, 1), own.view(1, -1, 1))
    return Continuations(x.contexts, tokens, x.lengths)


def without_eos(log_q: Float[Tensor, "chains V"], space: SequenceSpace) -> Float[Tensor, "chains V"]:
    """Forbid EOS and normalise over the other tokens."""
    if space.eos is not None:
        log_q = log_q.clone()
        log_q[:, space.eos] = -torch.inf
    log_q = torch.where((log_q == -torch.inf).all(1, keepdim=True), 0.0, log_q)  # of chains without a site: not used
    return log_q - log_q.logsumexp(1, keepdim=True)


@torch.no_grad()
def site_scores(target: Target[Model], x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "chains V"]:
    """log_score of every chain with every token at its site, by the model's own way where it has one; EOS is −inf."""
    model, V, eos = target.model, target.space.vocab_size, target.space.eos
    is_open = torch.ones(len(site), V, dtype=torch.bool)
    if eos is not None:
        is_open[:, eos] = False
    is_open[site < 0] = torch.arange(V) == token_at(x, site)[site < 0].unsqueeze(1)  # without a site the token stays
    if isinstance(model, SiteModel):
        return torch.where(is_open, model.site_scores(x, site.clamp(min=0)).double().cpu(), -torch.inf)
    chain, token = is_open.nonzero().unbind(1)
    scores = torch.full(is_open.shape, -torch.inf, dtype=torch.float64)
    scores[chain, token] = written_scores(target, x, chain, site[chain], token)
    return scores


def written_scores(
    target: Target[Model],
    x: Continuations,
    chain: Int[Tensor, " n"],
    site: Int[Tensor, " n"],
    token: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """log_score of chain i with a token written at a site, for n such triples, in batches."""
    parts = []
    for some in torch.arange(len(chain)).split(_STRINGS):
        parts.append(log_scores(target, with_token(x.candidates(chain[some]), site[some], token[some])))
    return torch.cat(parts)
