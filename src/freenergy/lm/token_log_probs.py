"""Log-probabilities of each token of a given text (teacher forcing).

    log P_LM(x_t | c, x_<t) at every place t, and the k likeliest tokens there

The text is fed to the model's stepper token by token, so only the predictions of one place are in memory at once.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Advance, Progress
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.stepping import begin

_NUMBERS = 2**23  # log-probabilities held at once: 64 MB in float64


class TokenLogProbs(NamedTuple):
    """Numbers of every place of B × N continuations, float64 on the CPU; 0 where there is no token."""

    log_prob: Float[Tensor, "batch num length"]
    top: Int[Tensor, "batch num length k"]  # the likeliest first
    log_top: Float[Tensor, "batch num length k"]


@torch.no_grad()
def token_log_probs(
    lm: LanguageModel,
    x: Continuations,
    k: int = 0,
    truncation: Truncation = ANCESTRAL,
    progress: Progress = SILENT,
) -> TokenLogProbs:
    """Compute log P, or that of the truncated model, of each token, and the ``k`` likeliest tokens at each place."""
    if not 0 <= k <= lm.vocab_size:
        raise UserError(f"the {k} likeliest tokens were asked for: ask for 0 to {lm.vocab_size}")
    x = x.trimmed()
    B, N, L = x.tokens.shape
    rows = max(1, _NUMBERS // lm.vocab_size)
    contexts, found = max(1, rows // max(1, N)), []
    with progress.track("log-probabilities", None, "steps") as advance:
        for b in range(0, B if N and L else 0, contexts):
            some = x[b : b + contexts]
            parts = [_read(lm, some.candidates(slice(n, n + rows)), k, truncation, advance) for n in range(0, N, rows)]
            found.append(tuple(torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)))
    if not found:
        blank = torch.zeros(B, N, L, k)
        return TokenLogProbs(torch.zeros(B, N, L).double(), blank.long(), blank.double())
    return TokenLogProbs(*(torch.cat(columns) for columns in zip(*found, strict=True)))


@torch.no_grad()
def log_proposal(lm: LanguageModel, x: Continuations, truncation: Truncation) -> Float[Tensor, "B N"]:
    """Compute log q(x | c) of given continuations, float64 on the CPU: −inf where the proposal cannot draw them."""
    if not x.tokens.shape[2]:
        return torch.zeros(x.shape, dtype=torch.float64)
    return _read(lm, x, 0, truncation)[0].cumsum(-1)[..., -1]


def _read(
    lm: LanguageModel, x: Continuations, k: int, truncation: Truncation, advance: Advance | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    B, N, L = x.tokens.shape
    stepper, columns = begin(lm, x.contexts.trimmed(), N, L), []
    log_p = stepper.first().unsqueeze(1).expand(B, N, -1)
    for t in range(L):
        if t:
            log_p = stepper.step(x.tokens[:, :, t - 1].to(log_p.device))
        log_q = truncation(log_p)
        own = log_q.gather(-1, x.tokens[:, :, t : t + 1].to(log_q.device)).squeeze(-1)
        log_top, top = log_q.topk(k, dim=-1)
        columns.append((own.double().cpu(), top.cpu(), log_top.double().cpu()))
        if advance is not None:
            advance(1)
    log_prob, tops, log_tops = (torch.stack(places, dim=2) for places in zip(*columns, strict=True))
    mask = x.mask.cpu()
    return log_prob.where(mask, 0), tops * mask.unsqueeze(-1), log_tops.where(mask.unsqueeze(-1), 0)
