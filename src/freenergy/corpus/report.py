"""The report of the corpus stage: counts and a few examples."""

from dataclasses import asdict, dataclass
from typing import Any, final

from freenergy.corpus.settings import SPLITS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One split; ``ngrams_shared`` is the share of its n-grams that occur in earlier splits, None if not computed.

    ``tokens`` counts the EOS of each document; ``bytes`` are those of the text; ``windows`` are those kept.
    """

    documents: int
    tokens: int
    bytes: int
    windows: int
    windows_dropped: int = 0
    ngrams_shared: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A window as text."""

    prefix: str
    continuation: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """The metadata of a corpus; ``fingerprint`` identifies its content."""

    fingerprint: str
    tokenizer: str
    vocab_size: int
    eos: int
    prefix: int
    continuation: int
    ending: str
    ngram: int
    splits: dict[str, SplitReport]
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON-like values."""
        return {**asdict(self), "examples": [asdict(example) for example in self.examples]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CorpusReport":
        """Return the inverse of ``to_json``."""
        splits = {name: SplitReport(**value["splits"][name]) for name in SPLITS if name in value["splits"]}
        examples = tuple(Example(**example) for example in value["examples"])
        return cls(**{**value, "splits": splits, "examples": examples})
