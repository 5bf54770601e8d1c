"""What the contract checks share: the strings of a space, and one comparison that says what is off and by how much."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from freenergy.core.sequences import Continuations, Sequences, SequenceSpace

Lists = Sequence[Sequence[int]]


def everything(contexts: Lists, space: SequenceSpace) -> Continuations:
    """Return every string of the space as a continuation of each context."""
    strings, B = space.enumerate(), len(contexts)
    tokens = strings.tokens.expand(B, *strings.tokens.shape)
    return Continuations(Sequences.from_lists(contexts), tokens, strings.lengths.expand(B, -1))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, claim: str) -> None:
    """Raise an AssertionError that names the claim and its error; −∞ on both sides is equal."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    both_impossible = (found == -math.inf) & (wanted == -math.inf)
    gap = torch.where(both_impossible, 0, (found - wanted).abs())
    worst = float(gap.max()) if gap.numel() else 0.0
    assert worst <= tolerance, f"{claim}: off by {worst:.2e}, more than {tolerance:.0e}"
