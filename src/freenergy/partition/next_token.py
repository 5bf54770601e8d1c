"""What comes next, under the base and under the residual model (section A.1 and Table 3 of Deng et al. 2020).

    P(v | c, h) = a_v / Σ_u a_u,      a_v = P_LM(v | c, h) · Z(c, h v)
    Ẑ(c, h v) = (1/m) Σ_j e^{−E(c, h v y_j)},      y_j ~ P_LM(· | c, h v)

h is what has been written of the continuation. The k likeliest tokens of the base are strata with m completions each;
all other tokens are one more stratum, whose completions begin with a token drawn from the base's tail. So Σ_u a_u is an
unbiased estimate of the whole Z(c, h), and the probabilities with that of the others sum to one. ``restricted`` leaves
the others out, as the paper's table does: both models renormalised over the k tokens.

The strata are independent, so with the relative error r_u of each a_u the delta method gives

    se(P_v)² = P_v² · [(1 − P_v)² r_v² + Σ_{u≠v} P_u² r_u²]

At the last position Z(c, h v) = e^{−E(c, h v)} and the sum over the vocabulary is done (``exact_last``), nothing is
left to chance. ``completions=None`` sums over all endings wherever there are few enough.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance, Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Model, Target
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.energies.call import energies_in_batches
from freenergy.models.residual import Residual, residual_of
from freenergy.partition.drawing import sample_from
from freenergy.partition.estimate import main_reason
from freenergy.partition.exact import after, completed, exact_after
from freenergy.partition.weights import log_partition

_ROWS = 1024  # completions in memory at once
_PARTS = 64  # tokens drawn from the tail at once: each takes a vocabulary
_SILENT = Silent()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NextRow:
    """One token that may come next, or all tokens that have no row of their own (``token`` None)."""

    base: float  # P_LM(v | c, h)
    joint: float  # P(v | c, h)
    standard_error: float  # of ``joint``
    log_partition: float  # log Ẑ(c, h v)
    ess: float | None  # effective completions; None where nothing was drawn
    verdict: str  # why not to believe it
    token: int | None = None
    base_rank: int | None = None  # 1 is the likeliest
    joint_rank: int | None = None  # among the rows
    base_restricted: float | None = None  # renormalised over the rows
    restricted: float | None = None
    restricted_error: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """The k likeliest tokens of the base, likeliest first, and the rest."""

    rows: tuple[NextRow, ...]
    other: NextRow | None  # None where every token has a row
    completions: int | None  # of each stratum
    is_exact: bool
    base_tokens: int  # drawn from the base

    def verdict(self) -> str:
        """Return one sentence on all strata; empty where nothing speaks against believing them."""
        strata = [*self.rows, *([self.other] if self.other else [])]
        bad, why = main_reason([row.verdict for row in strata])
        if not bad:
            return ""
        return (
            f"the model's probabilities and their errors are rough, since in {bad} of {len(strata)} strata {why}: "
            "draw more completions"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, None for those that JSON has not."""
        other = None if self.other is None else _plain(self.other)
        return {**asdict(self), "rows": [_plain(row) for row in self.rows], "other": other, "verdict": self.verdict()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Strata:
    """log Ẑ of each stratum, its relative error and diagnostics."""

    log_z: Float[Tensor, " S"]
    relative: Float[Tensor, " S"]
    ess: list[float | None]
    verdicts: list[str]
    tokens: int

    @classmethod
    def exact(cls, log_z: Float[Tensor, " S"]) -> "_Strata":
        """Nothing is left to chance."""
        S = len(log_z)
        return cls(log_z=log_z, relative=torch.zeros_like(log_z), ess=[None] * S, verdicts=[""] * S, tokens=0)


@torch.no_grad()
def next_token(
    target: Target[Model],
    head: Sequence[int],
    rng: Rng,
    *,
    top_k: int = 10,
    completions: int | None = 128,
    exact_last: bool = True,
    progress: Progress = _SILENT,
) -> NextToken:
    """Estimate P(v | c, h) of the ``top_k`` likeliest tokens after the one context and the head.

    Each token has ``completions`` of its own; without them all endings are summed over. The target's space holds
    whole texts.
    """
    context, space = target.contexts, target.space
    _check(context, head, space, top_k, completions)
    model, heads = residual_of(target), _as_heads(head)
    left = Target(model, context, replace(space, length=space.length - len(head)))
    log_p = model.base.next_log_probs(after(context, heads, model.base.eos))[0].double().cpu()
    order = log_p.argsort(descending=True, stable=True)[: int((log_p > -torch.inf).sum())]
    top, tail = order[:top_k], order[top_k:]
    log_mass = torch.cat([log_p[top], log_p[tail].logsumexp(0, keepdim=True)])[: len(top) + bool(len(tail))]
    is_exact = completions is None or (exact_last and left.space.length == 1)
    if is_exact:
        log_z = _summed(left, heads, log_p)
        other = (log_p[tail] + log_z[tail]).logsumexp(0, keepdim=True) - log_mass[-1]
        strata = _Strata.exact(torch.cat([log_z[top], other])[: len(log_mass)])
    else:
        assert completions is not None
        first = _first_tokens(top, tail, log_p, completions, rng.child("other"))
        with progress.track("rolling out", first.numel(), "completions") as advance:
            strata = _rolled_out(left, head, first, rng.child("completions"), advance)
    rows, k = _rows(top.tolist(), log_mass, strata), len(top)
    return NextToken(
        rows=tuple(rows[:k]),
        other=rows[k] if len(tail) else None,
        completions=None if is_exact else completions,
        is_exact=is_exact,
        base_tokens=strata.tokens,
    )


def first_given(
    left: Target[Residual],
    head: Sequence[int],
    first: Int[Tensor, " N"],
    rng: Rng,
    truncation: Truncation = ANCESTRAL,
) -> Draws:
    """Draw N continuations of the one context: head, first token, and an ending from the proposal.

    ``left`` is the target with what is left of the space after the head. The log-probabilities are of
    what follows the head, the given token included.
    """
    base, context, heads = left.model.base, left.contexts, _as_heads(head)
    draws = sample_from(base, after(context, heads, base.eos), first.unsqueeze(0), left.space, rng, truncation)
    return Draws(completed(context, heads, draws.x), draws.log_base, draws.log_proposal)


def standard_errors(share: Float[Tensor, " S"], relative: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """se of P_v = a_v/Σ a_u from the relative errors of independent a_u; see above.

    >>> standard_errors(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.0])).tolist()
    [0.125, 0.125]
    """
    noise = (share * relative).square()
    others = (noise.sum() - noise).clamp(min=0)
    return share * ((1 - share).square() * relative.square() + others).sqrt()


def _rolled_out(
    left: Target[Residual], head: Sequence[int], first: Int[Tensor, "S m"], rng: Rng, advance: Advance
) -> _Strata:
    """log Ẑ from drawn completions; only their weights are kept."""
    each, log_w, tokens = first.flatten(), [], 0
    for n in range(0, len(each), _ROWS):
        x = first_given(left, head, each[n : n + _ROWS], rng.shift(candidates=n)).x
        log_w.append(-energies_in_batches(left.model.energy, x, allow_inf=True)[0])  # draws of P_LM itself: w = e^{−E}
        tokens += int(x.lengths.sum()) - x.shape[1] * (len(head) + 1)
        advance(x.shape[1])
    found = log_partition(torch.cat(log_w).view(first.shape))
    return _Strata(
        log_z=found.lower,
        relative=torch.where(found.ess > 0, found.standard_error, 0.0),  # where nothing has weight the verdict says so
        ess=found.ess.tolist(),
        verdicts=found.verdicts(),
        tokens=tokens,
    )


def _summed(target: Target[Residual], heads: Int[Tensor, "1 t"], log_p: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """log Z(c, h v) of every token v, by summing over every ending."""
    context, left, V, t = target.contexts, target.space, len(log_p), heads.shape[1]
    grown = torch.cat([heads.expand(V, t), torch.arange(V).unsqueeze(1)], dim=1)
    ends = (grown[:, -1] == (-1 if left.eos is None else left.eos)) | (left.length == 1)
    log_z = torch.zeros(V, dtype=torch.float64)
    if ends.any():
        x = Continuations(context, grown[ends].unsqueeze(0), torch.full((1, int(ends.sum())), t + 1))
        log_z[ends] = -energies_in_batches(target.model.energy, x, allow_inf=True)[0]
    if not ends.all():
        going = grown[~ends]
        contexts = Sequences(context.tokens.expand(len(going), -1), context.lengths.expand(len(going)))
        rest = replace(left, length=left.length - 1)
        log_z[~ends] = exact_after(Target(target.model, contexts, rest), going)
    return log_z


def _rows(tokens: list[int], log_mass: Float[Tensor, " S"], strata: _Strata) -> list[NextRow]:
    """Probabilities from the strata; the last is that of the others where there are some."""
    k, log_a = len(tokens), log_mass + strata.log_z
    log_total = log_a.logsumexp(0)
    if not log_total.isfinite():
        raise UserError(
            f"the weights of what may come next add up to {float(log_total.exp())}: no completion is acceptable; take "
            "more completions, or look at the energy"
        )
    joint = (log_a - log_total).exp()
    base = log_mass.softmax(0)
    over_rows = log_a[:k].logsumexp(0)
    restricted = torch.where(over_rows > -torch.inf, (log_a[:k] - over_rows).exp(), 0.0)
    error, restricted_error = (standard_errors(p, strata.relative[: len(p)]) for p in (joint, restricted))
    rank = joint[:k].argsort(descending=True, stable=True).argsort() + 1
    over_all = zip(base.tolist(), joint.tolist(), error.tolist(), strict=True)
    common = [
        {"base": p, "joint": q, "standard_error": e, "log_partition": z, "ess": ess, "verdict": verdict}
        for (p, q, e), z, ess, verdict in zip(over_all, strata.log_z.tolist(), strata.ess, strata.verdicts, strict=True)
    ]
    columns = (rank, base[:k] / base[:k].sum(), restricted, restricted_error)
    names = ("joint_rank", "base_restricted", "restricted", "restricted_error")
    own = [dict(zip(names, row, strict=True)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    rows = [NextRow(token=tokens[i], base_rank=i + 1, **own[i], **common[i]) for i in range(k)]
    return [*rows, *(NextRow(**values) for values in common[k:])]


def _first_tokens(
    top: Int[Tensor, " k"], tail: Int[Tensor, " others"], log_p: Float[Tensor, " V"], num: int, rng: Rng
) -> Int[Tensor, "S num"]:
    """What completions begin with: each of the top in its stratum; in the last one independent draws from the tail."""
    first = top.unsqueeze(1).expand(-1, num)
    if not len(tail):
        return first
    few = (min(_PARTS, num - n) for n in range(0, num, _PARTS))
    drawn = torch.cat([rng.categorical(log_p[tail].expand(count, -1)) for count in few])
    return torch.cat([first, tail[drawn].unsqueeze(0)])


def _as_heads(head: Sequence[int]) -> Int[Tensor, "1 t"]:
    return torch.tensor(list(head), dtype=torch.long).unsqueeze(0)


def _plain(row: NextRow) -> dict[str, Any]:
    values = asdict(row)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def _check(context: Sequences, head: Sequence[int], space: SequenceSpace, top_k: int, completions: int | None) -> None:
    if len(context) != 1:
        raise UserError(f"the next token of {len(context)} contexts was asked for: give one")
    if len(head) >= space.length:
        raise UserError(
            f"{len(head)} tokens are written of a continuation of {space.length}: nothing comes next, give fewer"
        )
    if space.eos is not None and space.eos in head:
        raise UserError("EOS is in the written part, after which nothing comes: leave it out")
    if any(not 0 <= token < space.vocab_size for token in head):
        raise UserError(f"the written part has a token that is not below {space.vocab_size}: encode it with this model")
    if top_k < 1:
        raise UserError(f"top_k is {top_k}: set it to 1 or more")
    if completions is not None and completions < 2:
        raise UserError(f"{completions} completions give no standard error: set completions to 2 or more")
