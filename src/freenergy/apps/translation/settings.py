"""Settings of a translation experiment: which pairs, which network, what is measured.

The names of the splits are those of files ``SPLIT.LANGUAGE`` (or with ``.gz``) in the folder ``path``. A named resource
of pairs comes in one file; a share of it is held out twice, for validation and for the test.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationSettings:
    """Pairs of sentences, and the encoder–decoder that learns to translate the one into the other."""

    MEASURING: ClassVar[tuple[str, ...]] = ("test", "beams", "resampled", "lengths", "exposure_pairs")

    path: str  # a folder of files SPLIT.LANGUAGE, or the name of a resource of pairs
    source: str = "en"
    target: str = "de"
    train: str = "train"
    validation: str = "val"
    test: str = "test_2016_flickr"
    held_out_share: float = 0.02  # of an unsplit resource: for validation, and as much again for the test
    vocabulary: int = 8000  # tokens of one byte-pair vocabulary for both languages
    longest: int = 60  # tokens per sentence, EOS included: longer training pairs are dropped, others are cut
    layers: int = 3  # of the encoder, and as many of the decoder
    width: int = 256
    heads: int = 4
    feedforward: int = 1024
    dropout: float = 0.2
    batch_tokens: int = 2048  # per batch in validation and measurement; training has its own batch_size
    beams: int = 5
    resampled: tuple[int, ...] = (5, 10)  # numbers K of candidates for resampling
    lengths: tuple[int, ...] = (12, 18)  # words of the reference that separate the BLEU groups; the paper: 25, 50
    exposure_pairs: int = 1000  # training pairs whose true words are read after the network's own; 0 for none

    def __post_init__(self) -> None:
        for name in ("path", "source", "target", "train", "validation", "test"):
            if not getattr(self, name):
                raise UserError(f"translation.{name} is empty: name {_MEANING.get(name, 'a split of the pairs')}")
        if self.source == self.target:
            raise UserError(f"translation.source and translation.target are both {self.source!r}: name two languages")
        check_range(self, "layers", "width", "heads", "feedforward", "beams", at_least=1, section=_SECTION)
        check_range(self, "vocabulary", at_least=257, section=_SECTION)
        check_range(self, "longest", at_least=2, section=_SECTION)
        check_range(self, "batch_tokens", at_least=self.longest, section=_SECTION)
        check_range(self, "exposure_pairs", at_least=0, section=_SECTION)
        if self.width % self.heads:
            raise UserError(f"a width of {self.width} does not divide into {self.heads} heads: change one of them")
        check_range(self, "dropout", at_least=0, below=1, section=_SECTION)
        check_range(self, "held_out_share", above=0, below=0.5, section=_SECTION)
        for name in ("resampled", "lengths"):
            numbers = getattr(self, name)
            if list(numbers) != sorted(set(numbers)) or min(numbers, default=1) < 1:
                raise UserError(f"translation.{name} is {list(numbers)}: give ascending numbers, each 1 or more")


_SECTION = "subject."
_MEANING = {"path": "a folder of pairs or a resource of them", "source": "a language", "target": "a language"}
