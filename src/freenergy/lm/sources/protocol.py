"""What a source of texts is asked, and what it answers.

draw([(c, n), …]) → texts        candidate n of a context c has the same text whenever it is asked for, if the source
keeps to its seeds; texts of one context are independent draws of the same law
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from freenergy.core.rng import Rng

_LARGEST_SEED = 2**31


@final
@dataclass(frozen=True, slots=True)
class TextRequest:
    """One text that continues a prefix: the number ``candidate`` of the context whose random stream is ``rng``."""

    prefix: str
    rng: Rng
    candidate: int
    length: int  # tokens of the base's tokenizer beyond which the text is cut

    @property
    def seed(self) -> int:
        """The seed of this text, below 2³¹."""
        return self.rng.child(self.candidate).integer() % _LARGEST_SEED


@final
@dataclass(frozen=True, slots=True)
class DrawnText:
    """A text as the source gave it; ``has_ended`` is False where the source was cut off."""

    text: str
    has_ended: bool = True


@runtime_checkable
class TextSource(Protocol):
    """Something that writes texts."""

    def draw(self, requests: Sequence[TextRequest]) -> list[DrawnText]:
        """Return one text per request, in their order."""
        ...

    def part(self, split: str) -> "TextSource":
        """Return the source of texts for windows of a split: itself, unless its texts are finite."""
        ...
