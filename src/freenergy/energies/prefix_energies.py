"""Where in a text its energy rises, token by token.

    rise_t = E(c, x_≤t) − E(c, x_<t),      t = 2 … L;      Σ_t rise_t = E(c, x) − E(c, x_≤1)

The beginnings of x are read as one batch. There is no rise at the first token: an energy need not be defined for
an empty text. An energy was trained on whole continuations and reads a beginning as if the text stopped there, so this
is a heuristic attribution, not a calibrated quantity. The residual model's own probability of each token is another,
more expensive quantity: ``partition.steps``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.roles import Energy
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.call import energies_in_batches

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A token, or the tokens that spell one character between them."""

    text: str
    tokens: tuple[int, ...]
    energy: float  # E(c, x_≤t) at the last of its tokens
    rise: float | None  # over all its tokens; None at the start of the text, and between two forbidden beginnings

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers; an energy of +inf becomes None."""
        return {**asdict(self), "tokens": len(self.tokens), "energy": None if self.energy == torch.inf else self.energy}


@torch.no_grad()
def energies_of_beginnings(
    energy: Energy, context: Sequence[int], x: Sequence[int], *, rows: int = 256, progress: Progress = SILENT
) -> Float[Tensor, " L"]:
    """Compute E(c, x_≤1) … E(c, x_≤L), float64; +inf where a beginning is forbidden."""
    if not x:
        raise UserError("there is no text to read: give a continuation of one token or more")
    beginnings, found = Continuations.from_lists([context], [[x[: t + 1] for t in range(len(x))]]), []
    with progress.track("reading beginnings", len(x), "tokens") as advance:
        for t in range(0, len(x), rows):
            some = beginnings.candidates(slice(t, t + rows))
            found.append(energies_in_batches(energy, some, batch_size=rows, allow_inf=True)[0])
            advance(some.shape[1])
    return torch.cat(found)


def rising(
    energy: Energy,
    tokenizer: Tokenizer,
    context: Sequence[int],
    x: Sequence[int],
    rows: int = 256,
    progress: Progress = SILENT,
) -> tuple[Piece, ...]:
    """Return the pieces of a text with what each adds to its energy."""
    E = energies_of_beginnings(energy, context, x, rows=rows, progress=progress).tolist()
    found, start = [], 0
    for end, text in pieces(tokenizer, x):
        rise = E[end - 1] - E[start - 1] if start else None
        is_number = rise is not None and abs(rise) < torch.inf
        piece = Piece(text=text, tokens=tuple(x[start:end]), energy=E[end - 1], rise=rise if is_number else None)
        found.append(piece)
        start = end
    return tuple(found)


def pieces(tokenizer: Tokenizer, x: Sequence[int]) -> list[tuple[int, str]]:
    """Cut the text of x between tokens, but not inside characters: return the end and the text of each piece."""
    found, shown, start = list[tuple[int, str]](), "", 0
    for end in range(1, len(x) + 1):
        text = tokenizer.decode(x[:end])
        if text.endswith(_BROKEN) and end < len(x):  # a later token may complete it
            continue
        # decoders that tidy up may change what was there
        added = text[len(shown) :] if text.startswith(shown) else tokenizer.decode(x[start:end])
        found.append((end, added))
        shown, start = text, end
    return found
