"""Sentences of words with tags, as they stand in files.

    x = (x_1, …, x_T) words,      y = (y_1, …, y_T) tags,      columns: what a file says of each word besides

A tag may be known in part: ``_`` stands for any tag, ``B-PER|B-LOC`` for one of these. Which tags a set has is the
``TagSet``'s business; nothing here knows a scheme.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor

from freenergy.core.errors import UserError

UNKNOWN, OR = "_", "|"


@final
@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence; ``tags`` is empty where the file has none.

    ``rows`` are the lines of a table that it came from, ``places`` the row of each word, ``more`` the other keys of a
    JSON object: what is needed to write the sentence back as it was.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()  # of each word
    rows: tuple[tuple[str, ...], ...] = ()
    places: tuple[int, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.words:
            raise UserError("a sentence has no words: leave it out")
        for name, given in (("tags", self.tags), ("columns", self.columns)):
            if given and len(given) != len(self.words):
                raise UserError(
                    f"a sentence of {len(self.words)} words has {len(given)} {name} ({' '.join(self.words)[:60]!r}): "
                    "give one for each word"
                )

    def __len__(self) -> int:
        return len(self.words)

    def tagged(self, tags: Sequence[str]) -> "Sentence":
        """Returns the sentence with other tags."""
        return replace(self, tags=tuple(tags))


@final
@dataclass(frozen=True, slots=True)
class TagSet:
    """The tags of a model, in order: tag k is ``names[k]``."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sentence], *, partial: bool = False) -> "TagSet":
        """Returns the tags that occur, sorted."""
        seen = {one for sentence in sentences for tag in sentence.tags for one in _options(tag, partial)}
        if not seen:
            raise UserError("the training sentences have no tags: check data.tag, the column that has them")
        return cls(tuple(sorted(seen)))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, tag: str) -> int:
        """Returns k of a tag."""
        try:
            return self.names.index(tag)
        except ValueError:
            known = ", ".join(self.names[:20]) + (", …" if len(self) > 20 else "")
            raise UserError(
                f"the tag {tag!r} is not in the tag set ({known}): fix that tag, or train with it"
            ) from None

    def allowed(self, tag: str, *, partial: bool = False) -> Bool[Tensor, " K"]:
        """Returns which tags a word may have that is labelled like this; all of them where it is not labelled."""
        options = _options(tag, partial)
        found = torch.ones(len(self), dtype=torch.bool)
        if options:
            found = torch.zeros(len(self), dtype=torch.bool)
            found[[self.number(one) for one in options]] = True
        return found


def _options(tag: str, partial: bool) -> list[str]:
    """Returns the tags that a label allows; none where it says nothing."""
    if not partial:
        return [tag]
    return [] if tag in ("", UNKNOWN) else tag.split(OR)
