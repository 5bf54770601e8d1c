"""Where a run's language model comes from when no network is trained: counted, found, or behind a server."""

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NgramBase:
    """An n-gram model with modified Kneser-Ney smoothing, counted on the corpus."""

    kind: Literal["ngram"] = "ngram"
    order: int = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedBase:
    """A checkpoint as it is: a named resource, a Hugging Face id, a folder or a GGUF file."""

    kind: Literal["pretrained"] = "pretrained"
    path: str


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
