"""Calling an energy: E(c, x) of many strings in batches, checked before anything is computed from it.

    E[b, n] is finite, or +inf where ``allow_inf`` says that exp(−E) = 0 may be; NaN and −inf are always refused

This is the one place where an energy's numbers enter: samplers, estimators, training and evaluation all call it.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.roles import Energy
from freenergy.core.scored import equal_strings, first_of_each
from freenergy.core.sequences import Continuations

Known = Mapping[str, Float[Tensor, "B N"]]


def energies_of(
    energy: Energy, x: Continuations, *, where: str = "", allow_inf: bool = False, known: Known | None = None
) -> Float[Tensor, "B N"]:
    """Compute E(c, x) in one call, with gradients where there are any.

    ``where`` names the batch in error messages. ``known`` are numbers of x that this energy takes as keyword arguments.
    """
    return check_energies(energy(x, **(known or {})), energy, x.shape, where=where, allow_inf=allow_inf)


def check_energies(
    E: object, energy: object, shape: tuple[int, int], *, where: str = "", allow_inf: bool = False
) -> Float[Tensor, "B N"]:
    """Return E; refuse, with the class and the place, what is not [B, N] finite numbers (or +inf if ``allow_inf``)."""
    at, name = f" in {where}" if where else "", type(energy).__name__
    if not isinstance(E, Tensor) or tuple(E.shape) != shape:
        found = f"shape {tuple(E.shape)}" if isinstance(E, Tensor) else f"a {type(E).__name__}"
        raise UserError(
            f"the energy {name} returned {found} for {shape[0]} contexts with {shape[1]} continuations each{at}: "
            f"return one number per continuation, shape {shape}"
        )
    if E.is_complex():
        raise UserError(f"the energy {name} returned complex numbers{at}: return real ones")
    good = torch.isfinite(E) | (torch.inf == E) if allow_inf else torch.isfinite(E)
    if not good.all():
        b, n = (~good).nonzero()[0].tolist()
        raise UserError(
            f"the energy {name} returned {E[b, n].item()} for continuation {n} of context {b}{at}: lower the learning "
            "rate if it was trained here, or look at that text"
        )
    return E


@torch.no_grad()
def energies_in_batches(
    energy: Energy,
    x: Continuations,
    *,
    batch_size: int = 256,
    distinct: bool = False,
    where: str = "",
    allow_inf: bool = False,
    known: Known | None = None,
) -> Float[Tensor, "B N"]:
    """Compute E(c, x) without gradients, at most ``batch_size`` continuations per call, in float64 on the CPU.

    With ``distinct`` equal continuations of a context are read once; ``known`` is not used then.
    """
    if distinct:
        return _distinct(energy, x, batch_size=batch_size, where=where, allow_inf=allow_inf)
    B, N = x.shape
    if not N:
        return torch.zeros(B, N, dtype=torch.float64)
    contexts = max(1, batch_size // N)
    rows = []
    for b in range(0, B, contexts):
        found = []
        for n in range(0, N, batch_size):
            part = x[b : b + contexts].candidates(slice(n, n + batch_size))
            numbers = {name: value[b : b + contexts, n : n + batch_size] for name, value in (known or {}).items()}
            E = energies_of(energy, part, where=where, allow_inf=allow_inf, known=numbers)
            found.append(E.double().cpu())
        rows.append(torch.cat(found, dim=1))
    return torch.cat(rows) if rows else torch.zeros(B, N, dtype=torch.float64)


def _distinct(
    energy: Energy, x: Continuations, *, batch_size: int, where: str, allow_inf: bool
) -> Float[Tensor, "B N"]:
    E = torch.zeros(x.shape, dtype=torch.float64)
    for b, which in enumerate(equal_strings(x)):
        places = first_of_each(which).nonzero().flatten()
        some = x[b : b + 1].candidates(places)
        read = energies_in_batches(energy, some, batch_size=batch_size, where=where, allow_inf=allow_inf)[0]
        E[b] = torch.zeros_like(read).scatter(0, which[places], read)[which]
    return E
