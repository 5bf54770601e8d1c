"""Perplexity of a residual model on any texts, with fresh draws.

    x_1 … x_{n−1} ~ q(· | c),      log w = log P_LM − log q − E,      then as in ``certified``

q is the base, or the base at another temperature. A truncated q (top k, nucleus) gives most real text probability
zero: resampling from it can never write that text, so there is nothing to certify, and it is refused.
"""

from dataclasses import replace

from jaxtyping import Integer
from numpy import arange, ndarray, unique

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus import Tokenizer
from freenergy.evaluation.certified import ResidualReport, WindowNumbers, check_draws, residual_report
from freenergy.evaluation.perplexity import Counts
from freenergy.lm.token_log_probs import log_proposal
from freenergy.models.residual import Residual
from freenergy.partition.exact import check_in_space

_SILENT = Silent()
_BATCH_SIZE = 256  # continuations


def residual_perplexity(
    model: Residual,
    windows: Continuations,
    draws: int,
    space: SequenceSpace,
    rng: Rng,
    *,
    tokenizer: Tokenizer | None = None,
    documents: Integer[ndarray, " some"] | None = None,
    truncation: Truncation = ANCESTRAL,
    progress: Progress = _SILENT,
) -> ResidualReport:
    """Measure on prefixes with one true continuation each; ``space`` is the set that the continuations come from.

    ``documents`` says which windows are of one document (each of its own unless given). Words and bytes are counted
    where a tokenizer is given.
    """
    check_draws(draws)
    check_proposal(truncation)
    W = windows.shape[0]
    if W < 1 or windows.shape[1] != 1:
        raise UserError(f"the windows have shape {windows.shape}: give one or more, with one true continuation each")
    check_in_space(windows, space)
    counts = _counts(windows, arange(W) if documents is None else documents, tokenizer)
    found = []
    with progress.track("perplexity of the residual model", W, "windows") as advance:
        for b in range(W):
            one = slice(b, b + 1)
            scores = _score(model, windows[one], draws, space, rng.shift(contexts=b), truncation)
            found.append(WindowNumbers.of(scores))
            advance(1)
    return residual_report(WindowNumbers.cat(found), counts)


def check_proposal(truncation: Truncation) -> None:
    """Refuse a proposal that gives real text probability zero."""
    if truncation.top_k is not None or truncation.top_p not in (None, 1.0):
        raise UserError(
            "a truncated proposal (top_k, top_p) gives real text probability zero, so nothing can be certified with "
            "it: leave top_k and top_p out (a temperature may stay)"
        )


def _score(
    model: Residual, x: Continuations, count: int, space: SequenceSpace, rng: Rng, truncation: Truncation
) -> Scored:
    """Score one window: its own text and ``count`` draws after it."""
    law: Law = "restricted" if truncation.is_identity else "model"  # the same law, and −E has no rounding error
    own = replace(model.scored(x), truncation=truncation, law=law)
    if law == "model":
        own = replace(own, log_proposal=log_proposal(model.base, x, truncation))
    parts = [own.of_context(0)]
    for first in range(0, count, _BATCH_SIZE):
        num, stream = min(_BATCH_SIZE, count - first), rng.shift(candidates=first)
        draws = model.propose(x.contexts, num, space, stream, truncation=truncation, law=law, allow_inf=False)
        parts.append(draws.of_context(0))
    return Scored.cat(parts, dim=1)


def _counts(x: Continuations, documents: Integer[ndarray, " some"], tokenizer: Tokenizer | None) -> Counts:
    if len(documents) != x.shape[0]:
        raise UserError(f"{len(documents)} numbers of documents for {x.shape[0]} windows: give one each")
    if tokenizer is not None:
        return Counts.of(x, documents, tokenizer)
    tokens = x.lengths[:, 0].double().numpy()
    return Counts(tokens, 0 * tokens, 0 * tokens, unique(documents, return_inverse=True)[1])
