"""How the certified gain of linear energies grows with the training windows.

    g(m) = certified gain on validation windows after a fit to the first m windows,      m = M/4, M/2, M
    next doubling:  g(2M) ≈ g(M) + d · min(1, d / d'),      d = g(M) − g(M/2),  d' = g(M/2) − g(M/4)

which is exact for g(m) = a − b · m^(−κ). The windows were chosen in random order, so the first m are a random choice;
l2 is chosen for each m as for all of them. Validation windows choose l2 and measure g, so g is slightly flattered.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import Objective
from freenergy.energies.features import FeatureEnergy
from freenergy.partition.certificate import certified_gain
from freenergy.training.convex import Offset, choose_l2, joint_energy
from freenergy.training.feature_cache import Pieces

_SHARES = (4, 2, 1)


def learning_curve(
    parts: Sequence[FeatureEnergy],
    learned: Sequence[Pieces],
    held_out: Sequence[Pieces],
    objective: Objective,
    grid: Sequence[float],
    offset: Offset | None = None,
    held_out_offset: Offset | None = None,
    *,
    cuts: int = 1,
    scratch: Path | None = None,
) -> dict[str, Any]:
    """Fit the parts to more and more of the windows, at last to all; return g and what the next doubling may add."""
    windows = learned[0].shape[0] // cuts
    gains, rows = [], []
    for m in dict.fromkeys(max(1, windows // share) for share in _SHARES):
        keep = (torch.arange(windows) < m).repeat(cuts)
        some, own = [each.some(keep) for each in learned], None if offset is None else offset[keep]
        chosen = choose_l2(parts, some, held_out, objective, grid, own, held_out_offset, scratch=scratch)
        E = joint_energy(parts, held_out)
        E = E if held_out_offset is None else E + held_out_offset
        gains.append(certified_gain(E[:, :1], E[:, 1:]))
        rows.append({"windows": m, "gain": gains[-1].mean().item(), "error": _error(gains[-1]), "l2": chosen.l2})
    return {"rows": rows, "negatives": learned[0].shape[1] - 1, "candidates": held_out[0].shape[1], **_next(gains)}


def _next(gains: Sequence[Float[Tensor, " W"]]) -> dict[str, float | None]:
    """Return the gain of the last doubling, its error, and what the next one is expected to add; None if unknown."""
    if len(gains) < len(_SHARES):
        return {"last_doubling": None, "last_doubling_error": None, "next_doubling": None}
    last = gains[2] - gains[1]
    found = next_doubling(*(gain.mean().item() for gain in gains))
    return {"last_doubling": last.mean().item(), "last_doubling_error": _error(last), "next_doubling": found}


def next_doubling(quarter: float, half: float, whole: float) -> float | None:
    """Return what twice the windows may add; 0 where the last doubling added nothing, None if only the last one did.

    >>> a, b = 1.0, 0.8
    >>> round(next_doubling(a - b / 100**0.5, a - b / 200**0.5, a - b / 400**0.5) + a - b / 400**0.5, 9)
    0.971715729
    >>> round(a - b / 800**0.5, 9)
    0.971715729
    """
    first, last = half - quarter, whole - half
    if last <= 0:
        return 0.0
    return last * min(1.0, last / first) if first > 0 else None


def _error(values: Float[Tensor, " W"]) -> float | None:
    """Return the standard error of a mean over windows; None if there is one window alone."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
