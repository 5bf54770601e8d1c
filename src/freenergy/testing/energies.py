"""The contract of ``Energy``: one number per continuation that depends on nothing else in the batch."""

from functools import partial

import torch

from freenergy.core.roles import Energy
from freenergy.core.sequences import Continuations, Sequences
from freenergy.testing.comparing import assert_close


def check_energy(energy: Energy, x: Continuations, *, tolerance: float = 1e-5) -> None:
    """Check every law of ``Energy``: [B, N], finite, the same each time, batch = single, padding inert."""
    first = energy(x).detach()
    assert tuple(first.shape) == x.shape, f"the energy has shape {tuple(first.shape)}, not {x.shape}"
    assert first.isfinite().all(), f"the energy is not finite at {(~first.isfinite()).nonzero().tolist()[:3]}"
    assert torch.equal(energy(x).detach(), first), "the energy of the same continuations changed between two calls"
    for b in range(x.shape[0]):
        alone = energy(x[b : b + 1]).detach()
        assert_close(alone[0], first[b], tolerance, f"batch = single at context {b}")
    turned = energy(x.candidates(torch.arange(x.shape[1]).flip(0))).detach()
    assert_close(turned.flip(1), first, tolerance, "the order of candidates does not matter")
    fill = partial(torch.nn.functional.pad, pad=(0, 3))
    wide = Sequences(fill(x.contexts.tokens), x.contexts.lengths)
    padded = energy(Continuations(wide, fill(x.tokens), x.lengths)).detach()
    assert_close(padded, first, tolerance, "padding is inert")
