"""Negatives that are the datum with some of its tokens rewritten by a masked language model.

    m_t ~ Bernoulli(M) at each token of x,      x̃_t ~ q(· | c, x with masks) where m_t = 1,      x̃_t = x_t elsewhere

(section 5.5 of Ou, "Energy-based models with applications to speech and language processing", 2024). The places are
filled independently given the masks. EOS is neither masked nor written, so a negative is as long as its datum.
``log_proposal`` is Σ_{t: m_t = 1} log q(x̃_t | c, x with masks): the log-probability given the datum and the masks, not
that of x̃ under all ways to come by it; so these negatives are relative to a law that is known only in this form.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.core.checks import check_range
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, LanguageModel, Model, NoiseState
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import normalised
from freenergy.lm.shared_prefix import seeing_both_ways
from freenergy.lm.stepping import check_fits, started

_LOGITS = 2**25  # numbers of logits held at once


@final
class Infilling:
    """Fills a share M of each datum's tokens by ``model``, a causal architecture that learned to see both ways.

    ``mask_token`` is the model's mask; ``lm`` is the base, which scores what comes out.
    """

    kind = "infilling"

    def __init__(self, model: PreTrainedModel, *, mask_token: int, share: float, lm: LanguageModel) -> None:
        self.model, self.mask_token, self.share, self.lm = model.eval(), mask_token, share, lm
        check_range(self, "share", above=0, at_most=1)

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: draws are independent."""
        return {}

    @torch.no_grad()
    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws ``num`` negatives for each window; each depends on the seed and the window's number alone."""
        true, rows = data.x.to(self.model.device), data.rows.tolist()
        parts = [self._of_window(true[b : b + 1], num, rng.shift(contexts=row)) for b, row in enumerate(rows)]
        x = Continuations.cat([part for part, _ in parts], dim=0)
        x = Continuations(true.contexts, x.tokens, x.lengths)
        return state, Draws(x, self.lm.log_prob(x), torch.cat([log_proposal for _, log_proposal in parts]))

    def log_noise(self, x: Continuations) -> None:
        """Returns None: the law given the context alone is an intractable sum over all data."""

    def _of_window(self, datum: Continuations, num: int, rng: Rng) -> tuple[Continuations, Float[Tensor, "1 N"]]:
        """Each candidate draws 2 L numbers: a coin and a token for every place."""
        L = int(datum.lengths[0, 0])
        tokens = datum.tokens[:, :1, :L].expand(1, num, L)
        stream = rng.rows(1, num, 2 * L)
        p = torch.where(tokens == self.lm.eos, 0.0, self.share).double()
        coins = torch.stack([(1 - p).log(), p.log()], dim=-1)
        hidden = torch.stack([stream.categorical(coins[:, :, t]) for t in range(L)], dim=-1).bool()
        log_q = self._log_fill(datum, torch.where(hidden, self.mask_token, tokens))
        # elsewhere the token is certain to stay
        stays = torch.full_like(log_q, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)
        log_q = torch.where(hidden.unsqueeze(-1), log_q, stays)
        new = torch.stack([stream.categorical(log_q[:, :, t]) for t in range(L)], dim=-1)
        log_proposal = log_q.gather(-1, new.unsqueeze(-1)).squeeze(-1).sum(-1, dtype=torch.float64)
        filled = torch.nn.functional.pad(new, (0, datum.tokens.shape[2] - L))
        return Continuations(datum.contexts, filled, torch.full((1, num), L, device=new.device)), log_proposal

    def _log_fill(self, datum: Continuations, masked: Int[Tensor, "1 N L"]) -> Float[Tensor, "1 N L V"]:
        """log q at every place of the continuations."""
        contexts = started(datum.contexts, self.lm.eos).trimmed()
        P, (_, N, L) = int(contexts.lengths[0]), masked.shape
        check_fits(contexts, L, getattr(self.model.config, "max_position_embeddings", None))
        whole = torch.cat([contexts.tokens.expand(N, P), masked[0]], dim=-1)
        V = self.model.config.vocab_size
        parts = []
        for some in whole.split(max(1, _LOGITS // ((P + L) * V))):
            with seeing_both_ways(self.model, torch.full((len(some),), P + L, device=some.device)):
                parts.append(self.model(some, use_cache=False).logits[:, P:])
        logits = torch.cat(parts).unsqueeze(0)
        never = torch.tensor([self.mask_token, self.lm.eos], device=logits.device)
        return normalised(logits.index_fill(-1, never, -torch.inf))
