"""An energy's numbers, looked at before they are used."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.roles import Energy
from freenergy.core.sequences import Continuations


def energies_of(
    energy: Energy,
    x: Continuations,
    *,
    where: str = "",
    allow_inf: bool = False,
    known: Mapping[str, Float[Tensor, "B N"]] | None = None,
) -> Float[Tensor, "B N"]:
    """E(c, x); one sentence that names the class and the batch where it is no [B, N] of finite numbers.

    ``allow_inf``: +inf is a number too, and says that the residual model never writes this. ``known`` is what this
    energy can be told of x beside x itself.
    """
    E = energy(x, **(known or {}))
    at = f" in {where}" if where else ""
    if not isinstance(E, Tensor) or tuple(E.shape) != x.shape:
        found = f"shape {tuple(E.shape)}" if isinstance(E, Tensor) else f"a {type(E).__name__}"
        raise UserError(
            f"the energy {type(energy).__name__} returned {found} for {x.shape[0]} contexts with {x.shape[1]} "
            f"continuations each{at}: return one number a continuation, shape {x.shape}"
        )
    good = torch.isfinite(E) | (torch.inf == E) if allow_inf else torch.isfinite(E)
    if not good.all():
        b, n = (~good).nonzero()[0].tolist()
        raise UserError(
            f"the energy {type(energy).__name__} returned {E[b, n].item()} for continuation {n} of context {b}{at}: "
            "lower the learning rate if it was trained here, or look at that text"
        )
    return E


@torch.no_grad()
def energies_in_parts(
    energy: Energy,
    x: Continuations,
    *,
    rows: int = 256,
    where: str = "",
    allow_inf: bool = False,
    known: Mapping[str, Float[Tensor, "B N"]] | None = None,
) -> Float[Tensor, "B N"]:
    """The same without gradients, at most ``rows`` continuations at once, in float64."""
    B, N = x.shape
    if not N:
        return torch.zeros(B, N, dtype=torch.float64)
    contexts = max(1, rows // max(N, 1))
    parts = []
    for b in range(0, B, contexts):
        some = x[b : b + contexts]
        found = []
        for n in range(0, N, rows):
            told = {name: values[b : b + contexts, n : n + rows] for name, values in (known or {}).items()}
            part = some.candidates(slice(n, n + rows))
            found.append(energies_of(energy, part, where=where, allow_inf=allow_inf, known=told))
        parts.append(torch.cat([E.double().cpu() for E in found], dim=1))
    return torch.cat(parts) if parts else torch.zeros(B, N, dtype=torch.float64)
