"""log Z by summing over every string.

    log Z(c, h) = log Σ_x P_LM(x | c, h) · e^{−E(c, h x)}

h is what has been written of the continuation so far: nothing for Z(c), all but one token for the last position, where
the sum is over the vocabulary and can be done for any model. P_LM reads c and h as its context, E reads h as part of
the continuation.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel, Model, Target
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.energies.call import energies_in_batches
from freenergy.lm.stepping import started
from freenergy.models.residual import residual_of
from freenergy.partition.estimate import LogPartition

_ROWS = 4096


def exact_log_partition(target: Target[Model]) -> Float[Tensor, " B"]:
    """Return log Z of each context, where the space is small enough to enumerate; float64."""
    return exact_after(target, torch.zeros(len(target), 0, dtype=torch.long))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """log Z by summing over every string: an estimator that leaves nothing to chance."""

    def __call__(self, target: Target[Model], rng: Rng) -> LogPartition:
        """Sum over the space of the target; ``rng`` is not used."""
        if not len(target):
            raise UserError("log Z of no contexts was asked for: give at least one")
        return LogPartition.exact(exact_log_partition(target), target.space.size)


@torch.no_grad()
def exact_after(target: Target[Model], heads: Int[Tensor, "B t"]) -> Float[Tensor, " B"]:
    """Return log Z of what may follow ``heads``; the target's space holds the endings."""
    model, contexts, space = residual_of(target), target.contexts, target.space
    strings, B = space.enumerate(), len(contexts)
    read = after(contexts, heads, model.base.eos)
    total = torch.full((B,), -torch.inf, dtype=torch.float64)
    for some in (strings[i : i + _ROWS] for i in range(0, len(strings), _ROWS)):
        tokens, lengths = some.tokens.expand(B, *some.tokens.shape), some.lengths.expand(B, -1)
        x = Continuations(read, tokens, lengths)
        E = energies_in_batches(model.energy, completed(contexts, heads, x), allow_inf=True)
        total = torch.logaddexp(total, (_log_base(model.base, x, space) - E).logsumexp(1))
    return total


def check_in_space(x: Continuations, space: SequenceSpace) -> None:
    """Refuse continuations that Z does not sum over: they have no probability under the model."""
    for tokens in (string for row in x.lists() for string in row):
        is_ended = space.eos is not None and tokens[-1:] == [space.eos] and len(tokens) < space.length
        if len(tokens) != space.length and not is_ended:
            raise UserError(
                f"a continuation of {len(tokens)} tokens is not in a space of {space.length}: cut or end it first"
            )


def _log_base(base: LanguageModel, x: Continuations, space: SequenceSpace) -> Float[Tensor, "B N"]:
    """log P_LM of the strings; single tokens from one reading of each context."""
    if space.length > 1:
        return base.log_prob(x).double().cpu()
    return base.next_log_probs(x.contexts).double().cpu().gather(1, x.tokens[:, :, 0])


def after(contexts: Sequences, heads: Int[Tensor, "B t"], eos: int) -> Sequences:
    """Return what P_LM has read when the heads are written."""
    begun = started(contexts, eos)
    if not heads.shape[1]:
        return begun
    lengths = torch.full((len(contexts), 1), heads.shape[1])
    return Continuations(begun, heads.unsqueeze(1), lengths).joined()


def completed(contexts: Sequences, heads: Int[Tensor, "B t"], endings: Continuations) -> Continuations:
    """Return heads and endings as continuations of the contexts, for the energy to read."""
    (_, N), t = endings.shape, heads.shape[1]
    tokens = torch.cat([heads.unsqueeze(1).expand(-1, N, -1), endings.tokens.cpu()], dim=2)
    return Continuations(contexts, tokens, endings.lengths.cpu() + t)
