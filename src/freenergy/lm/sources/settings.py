"""The settings of a base that only samples: a source of texts, and how they become continuations."""

from dataclasses import dataclass
from typing import Literal, final
from urllib.parse import urlsplit

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSource:
    """A program that reads requests as JSON lines and answers each with one JSON line; "python" is this interpreter."""

    kind: Literal["command"] = "command"
    command: tuple[str, ...]
    timeout_seconds: float = 60.0  # to wait for one text

    def __post_init__(self) -> None:
        check_range(self, "timeout_seconds", above=0)
        if not self.command or not self.command[0]:
            raise UserError('command is empty: give the program and its arguments, as in ["python", "write.py"]')


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """A Python function ``f(prefix, seed)`` that returns a text, named as "module:function"."""

    kind: Literal["function"] = "function"
    function: str

    def __post_init__(self) -> None:
        if not all(self.function.partition(":")):
            raise UserError(f"function is {self.function!r}: write it as module:function")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSource:
    """Texts that were written before, as JSON lines: a ``text`` (or ``texts``), with its ``prefix`` and ``split``."""

    kind: Literal["pool"] = "pool"
    path: str

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("path is empty: set it to the JSON-lines file with the texts of the pool")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSource:
    """An OpenAI-style endpoint that returns text; the key is read from the environment variable FREENERGY_API_KEY.

    ``chat`` says which dialect: messages (``/chat/completions``), or a prompt (``/completions``). ``prompt`` is what is
    sent, with {prefix} where the prefix goes. What is not set (temperature, top_p) is left to the server: no
    probability is needed, so any law will do, as long as it stays the same.
    """

    kind: Literal["endpoint"] = "endpoint"
    url: str
    model: str = ""
    chat: bool = True
    system: str = ""
    prompt: str = "{prefix}"
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None  # of the server's tokens; twice the length of a continuation unless given
    parallel: int = 8  # requests at a time
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_range(self, "parallel", "timeout_seconds", "max_tokens", above=0)
        check_range(self, "temperature", at_least=0)
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise UserError(f"url is {self.url!r}: give the server's address, such as http://127.0.0.1:8000/v1")
        if "@" in address.netloc:  # it would be stored in the run and shown
            raise UserError("url holds a name or password: leave it out, and put the key into FREENERGY_API_KEY")
        if self.system and not self.chat:
            raise UserError("system is a message of chat, and chat is false: put its words into prompt")


SourceSettings = CommandSource | FunctionSource | PoolSource | EndpointSource


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesBase:
    """A black box: texts are all that it gives, without their probabilities; it is not trained, only corrected."""

    kind: Literal["samples"] = "samples"
    source: SourceSettings
    lead: str = ""  # put before a text that begins without white space, where there is a prefix: " " for chat
