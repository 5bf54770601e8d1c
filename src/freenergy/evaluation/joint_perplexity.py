"""Perplexity of a residual model on any texts, with fresh draws.

    x_1 … x_{n−1} ~ q(· | c),      log w = log P_LM − log q − E,      then as in ``certified``

q is the base, or the base at another temperature. A truncated q (top k, nucleus) gives most real text probability
zero: resampling from it can never write that text, so there is nothing to certify, and it is refused.
"""

import torch
from jaxtyping import Float, Integer
from numpy import arange, ndarray, unique
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, LanguageModel, Truncation
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.corpus import Tokenizer
from freenergy.evaluation.certified import JointReport, WindowNumbers, check_draws, joint_report
from freenergy.evaluation.perplexity import Counts
from freenergy.evaluation.scores import WindowScores
from freenergy.partition.exact import check_in_space
from freenergy.text.model import ResidualModel

_SILENT = Silent()
_BATCH_SIZE = 256  # continuations


def joint_perplexity(
    model: ResidualModel,
    windows: Continuations,
    draws: int,
    space: SequenceSpace,
    rng: Rng,
    *,
    documents: Integer[ndarray, " some"] | None = None,
    truncation: Truncation = ANCESTRAL,
    progress: Progress = _SILENT,
) -> JointReport:
    """Measure on prefixes with one true continuation each; ``space`` is the set that the continuations come from.

    ``documents`` says which windows are of one document (each of its own unless given). Words and bytes are counted
    where the model has a tokenizer.
    """
    check_draws(draws)
    check_proposal(truncation)
    W = windows.shape[0]
    if W < 1 or windows.shape[1] != 1:
        raise UserError(f"the windows have shape {windows.shape}: give one or more, with one true continuation each")
    check_in_space(windows, space)
    counts = _counts(windows, arange(W) if documents is None else documents, model.tokenizer)
    found = []
    with progress.track("perplexity of the residual model", W, "windows") as advance:
        for b in range(W):
            one = slice(b, b + 1)
            scores = _score(model, windows[one], counts[one], draws, space, rng.shift(contexts=b), truncation)
            found.append(WindowNumbers.of(scores))
            advance(1)
    return joint_report(WindowNumbers.cat(found), counts)


def check_proposal(truncation: Truncation) -> None:
    """Refuse a proposal that gives real text probability zero."""
    if truncation.top_k is not None or truncation.top_p not in (None, 1.0):
        raise UserError(
            "a truncated proposal (top_k, top_p) gives real text probability zero, so nothing can be certified with "
            "it: leave top_k and top_p out (a temperature may stay)"
        )


def log_proposal_of(lm: LanguageModel, x: Continuations, truncation: Truncation) -> Float[Tensor, "B 1"]:
    """log q of one given continuation of each context, token by token."""
    if truncation.is_identity:
        return lm.log_prob(x).double().cpu()
    (B, _), contexts, total = x.shape, x.contexts.lists(), torch.zeros(x.shape[0], 1, dtype=torch.float64)
    rows = [row[0] for row in x.lists()]
    for t in range(max(map(len, rows), default=0)):
        going = [b for b in range(B) if t < len(rows[b])]
        before = Sequences.from_lists([contexts[b] + rows[b][:t] for b in going])
        log_q = truncation(lm.next_log_probs(before).double().cpu())
        chosen = torch.tensor([rows[b][t] for b in going])
        total[going, 0] += log_q.gather(1, chosen.unsqueeze(1)).squeeze(1)
    return total


def _score(
    model: ResidualModel,
    x: Continuations,
    counts: Counts,
    count: int,
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation,
) -> WindowScores:
    """The scores of one window, its own text first; of the draws their numbers are kept, and not their texts."""
    of_data = model.scored(x)
    parts = [[of_data.log_base, of_data.energy, x.lengths, log_proposal_of(model.base, x, truncation)]]
    for first in range(0, count, _BATCH_SIZE):
        num, stream = min(_BATCH_SIZE, count - first), rng.shift(candidates=first)
        draws = model.residual.propose(x.contexts, num, space, stream, truncation=truncation, allow_inf=False)
        parts.append([draws.log_base, draws.energy, draws.x.lengths, draws.log_proposal])
    log_base, energy, lengths, log_proposal = (
        torch.cat([values.double().cpu() for values in column], dim=1) for column in zip(*parts, strict=True)
    )
    proposal = None if truncation.is_identity else log_proposal
    return WindowScores(log_base=log_base, energy=energy, lengths=lengths, counts=counts, log_proposal=proposal)


def _counts(x: Continuations, documents: Integer[ndarray, " some"], tokenizer: Tokenizer | None) -> Counts:
    if len(documents) != x.shape[0]:
        raise UserError(f"{len(documents)} numbers of documents for {x.shape[0]} windows: give one each")
    if tokenizer is not None:
        return Counts.of(x, documents, tokenizer)
    tokens = x.lengths[:, 0].double().numpy()
    return Counts(tokens, 0 * tokens, 0 * tokens, unique(documents, return_inverse=True)[1])
