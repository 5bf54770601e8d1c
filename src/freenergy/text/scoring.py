"""Scores of many given continuations of one context in bounded memory: those of similar length are read together.

    cells of a batch = rows · longest continuation ≤ max_cells        (a longer continuation is read by itself)

A list that fits into one batch is read as it stands. Equal continuations are read once, so their numbers are equal to
the last bit.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.progress import SILENT, Progress
from freenergy.core.sequences import Continuations
from freenergy.models.residual import Residual

CELLS = 2**14  # tokens with padding per call of the models
_ROWS = 256  # continuations per call, as many as an energy reads at once
_CONTEXT_CELLS = 2**17  # the same with the context, which some energies read once per continuation


def length_batches(lengths: Sequence[int], context: int, max_cells: int) -> list[list[int]]:
    """Return the places of continuations in batches of similar length.

    >>> length_batches([1, 9, 2, 1], context=0, max_cells=9)
    [[0, 3, 2], [1]]
    """
    if _fits(len(lengths), max(lengths, default=0), context, max_cells):
        return [list(range(len(lengths)))]
    batches = list[list[int]]()
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):  # ascending: the last is the longest
        if batches and _fits(len(batches[-1]) + 1, lengths[place], context, max_cells):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _fits(rows: int, longest: int, context: int, max_cells: int) -> bool:
    return rows <= _ROWS and rows * longest <= max_cells and rows * (context + longest) <= _CONTEXT_CELLS


def score_in_batches(
    model: Residual,
    context: Sequence[int],
    xs: Sequence[tuple[int, ...]],
    *,
    max_cells: int = CELLS,
    progress: Progress = SILENT,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Compute log P_LM and E of continuations of one context, float64; an energy of +inf is allowed."""
    distinct = {x: i for i, x in enumerate(dict.fromkeys(xs))}
    rows = list(distinct)
    log_base, energy = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.float64)
    with progress.track("scoring", len(rows), "texts") as advance:
        for batch in length_batches([len(x) for x in rows], len(context), max_cells):
            x = Continuations.from_lists([context], [[rows[i] for i in batch]])
            scored = model.scored(x, allow_inf=True)
            log_base[batch], energy[batch] = scored.log_base[0].double(), scored.energy[0].double()
            advance(len(batch))
    places = torch.tensor([distinct[x] for x in xs])
    return log_base[places], energy[places]
