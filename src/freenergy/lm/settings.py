"""Where a run's language model comes from when it has no weights of its own: counted, or behind a server."""

from dataclasses import dataclass
from typing import Literal, final
from urllib.parse import urlsplit

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError

_LONGEST_NGRAM = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """A local mix on top of a base: n-grams of the training text, and words of the context, weighed token by token."""

    order: int = 5  # of the longest n-grams that are counted; 0: none
    cache: bool = True  # tokens that are in the context, and how rare they are
    copy: bool = True  # what followed the last tokens before
    entropy: bool = False  # a temperature that depends on how sure the base is
    documents: float = 0.85  # share of the training documents that is counted, the first; energies learn from the rest
    num_windows: int = 80  # of the validation text, whose tokens the weights are fitted to
    l2: float = 1e-6  # weight decay of the fit

    def __post_init__(self) -> None:
        check_range(self, "order", at_least=0, at_most=_LONGEST_NGRAM)
        check_range(self, "documents", above=0, at_most=1)
        check_range(self, "num_windows", at_least=1)
        check_range(self, "l2", at_least=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NgramBase:
    """An n-gram model with modified Kneser-Ney smoothing, counted on the corpus."""

    kind: Literal["ngram"] = "ngram"
    order: int = 5
    local: LocalSettings | None = None  # a stage of its own, after ``base``

    def __post_init__(self) -> None:
        check_range(self, "order", at_least=1, at_most=_LONGEST_NGRAM)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBase:
    """A model behind an OpenAI-style endpoint; the key is read from the environment variable FREENERGY_API_KEY."""

    kind: Literal["remote"] = "remote"
    url: str
    model: str = ""
    max_length: int | None = None
    most_log_probs: int = 20
    stops: tuple[int, ...] = ()
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise UserError(f"url is {self.url!r}: give the server's address, such as http://127.0.0.1:8000/v1")
        if "@" in address.netloc:  # it would be stored in the run and shown
            raise UserError("url holds a name or password: leave it out, and put the key into FREENERGY_API_KEY")
