"""An OpenAI-style ``/v1/completions`` server: one request, its answers, and every way it can fail.

    prompt (token ids) → answers, each a row of steps (token, log P(token | before), the likeliest tokens there)

Servers give log-probabilities in two shapes, and token ids in four places; here they become one. No error shows the
credentials of the address.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import httpx

from freenergy.core.errors import UserError

_ID = "token_id:"  # how vLLM spells a token when it is asked for ids
_LOWEST = -9000.0  # servers write -9999 or the lowest float where they mean minus infinity
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 8.0
_BUSY = (429, 503)
_MOST_BYTES = 2**28  # of an answer
_ANSWER_TIMEOUTS = 10  # maximum time of an answer, as a multiple of the time-out
_FRAMING = ("content-encoding", "content-length", "transfer-encoding")  # of what has been read and decoded

# every knob of vLLM and of llama.cpp that bends the law, at rest
_PLAIN = {
    "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "repeat_penalty": 1.0, "xtc_probability": 0.0, "dry_multiplier": 0.0,
    "stream": False, "n": 1, "return_tokens_as_token_ids": True, "return_token_ids": True,
}  # fmt: skip


class Refused(UserError):  # noqa: N818
    """The server answered with an error; ``status`` and ``reason`` are the server's."""

    def __init__(self, sentence: str, status: int, reason: str) -> None:
        super().__init__(sentence)
        self.status, self.reason = status, reason


class CompletionStep(NamedTuple):
    """One token of an answer: None where the server did not say."""

    token: int | None
    log_prob: float | None
    top: Mapping[int, float]


class Answer(NamedTuple):
    """One continuation as the server gave it."""

    steps: Sequence[CompletionStep]
    finish_reason: str | None = None
    stop_reason: object = None
    num_drawn: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The address and manners of a server; ``ask`` sends one request and reads its answers."""

    url: str = field(repr=False)
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 60.0
    attempts: int = 5
    path: Literal["completions", "chat/completions"] = "completions"  # which of the server's dialects

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError) as error:
            raise UserError(f"the server's address cannot be read ({error}): write http://host:port/v1") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(f"{self.url.split('@')[-1]!r} is not the address of a server: write http://host:port/v1")

    @property
    def endpoint(self) -> httpx.URL:
        """Return the address that is asked."""
        url = httpx.URL(self.url)
        path = url.path.rstrip("/")
        if not path.endswith("/completions"):
            path = f"{path}/{self.path}" if path.endswith("/v1") else f"{path}/v1/{self.path}"
        return url.copy_with(path=path)

    @property
    def shown(self) -> str:
        """Return the address for people: no user, no password, no query."""
        return str(self.endpoint.copy_with(username=None, password=None, query=None))

    def client(self) -> httpx.Client:
        """Open a connection pool, to be closed after use."""
        if self.api_key and not self.api_key.isascii():
            raise UserError("the API key holds characters that no key has: copy it again")
        headers = {"Authorization": f"Bearer {self.api_key.strip()}"} if self.api_key else {}
        certificates = self.endpoint.scheme == "https"  # reading them takes longer than a request on loopback
        return httpx.Client(headers=headers, timeout=self.timeout_seconds, verify=certificates)

    def ask(self, client: httpx.Client, prompts: Sequence[Sequence[int]], **knobs: Any) -> list[Answer]:
        """Send one request; its answers, one a prompt. Knobs that are not given are at rest."""
        named = {"model": self.model} if self.model else {}
        answers = self._read(self.post(client, {**named, **_PLAIN, **knobs, "prompt": prompts}))
        if len(answers) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts were sent and the server at {self.shown} gave {len(answers)} answers: set "
                "batch to 1, or use another server"
            )
        return answers

    def _read(self, response: httpx.Response) -> list[Answer]:
        try:
            content = response.json()
            replies = content if isinstance(content, list) else [content]  # some servers answer each prompt apart
            choices = [choice for reply in replies for choice in reply["choices"]]
            choices.sort(key=lambda choice: int(choice.get("index", 0)))
            answers = [_answer(choice) for choice in choices]
            drawn = [int(reply["usage"]["completion_tokens"]) for reply in replies if reply.get("usage")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            kind = response.headers.get("content-type", "").split(";")[0] or "something"
            raise UserError(
                f"the server at {self.shown} answered with {kind} that is not a completion ({type(error).__name__}): "
                "check that the address is of an OpenAI-style completions server"
            ) from error
        return [answers[0]._replace(num_drawn=drawn[0])] if len(answers) == len(drawn) == 1 else answers

    def _received(self, client: httpx.Client, body: Mapping[str, Any]) -> httpx.Response:
        """Read an answer of bounded size in bounded time: a server that never ends is given up."""
        deadline, content = time.monotonic() + _ANSWER_TIMEOUTS * self.timeout_seconds, bytearray()
        with client.stream("POST", self.endpoint, json=dict(body)) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > _MOST_BYTES or time.monotonic() > deadline:
                    raise UserError(
                        f"the server at {self.shown} does not end its answer ({len(content):,} bytes so far): use "
                        "another server, or ask for fewer log-probabilities"
                    )
        headers = {name: value for name, value in response.headers.items() if name.lower() not in _FRAMING}
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)

    def post(self, client: httpx.Client, body: Mapping[str, Any]) -> httpx.Response:
        """Ask, and ask again a few times where the server is busy or hangs up."""
        wait = _FIRST_WAIT_SECONDS
        for attempt in range(1, self.attempts + 1):
            try:
                response = self._received(client, body)
            except (httpx.ConnectError, httpx.TimeoutException, httpx.UnsupportedProtocol, UnicodeError) as error:
                raise self._silent(error) from error
            except httpx.TransportError as error:  # reset, or closed in the middle
                if attempt == self.attempts:
                    raise self._silent(error) from error
            else:
                if response.status_code not in _BUSY or attempt == self.attempts:
                    return self._accepted(response)
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _accepted(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        status, reason = response.status_code, _reason(response)
        remedy = "check the model's name and the request's size"
        if status in (401, 403):
            remedy = "check the API key"
        elif status in _BUSY:
            remedy = f"it stayed so over {self.attempts} attempts, try later or lower parallel"
        elif status == 404:
            remedy = "check the address and the model's name"
        elif status >= 500:
            remedy = "look at the server's own log"
        raise Refused(f"the server at {self.shown} answered {status} ({reason}): {remedy}", status, reason)

    def _silent(self, error: Exception) -> UserError:
        if isinstance(error, httpx.TimeoutException):
            return UserError(
                f"the server at {self.shown} did not answer within {self.timeout_seconds:g} seconds: raise "
                "timeout_seconds, or ask for less at once"
            )
        if isinstance(error, httpx.ConnectError):
            return UserError(f"no server answers at {self.shown} ({error}): start it, or correct the address")
        return UserError(
            f"the server at {self.shown} hung up {self.attempts} times ({error or type(error).__name__}): look at the "
            "server's own log"
        )


def _reason(response: httpx.Response) -> str:
    """Return the server's own words, in one short line."""
    try:
        content = response.json()
        error = content.get("error", content)
        words = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        words = "" if "html" in response.headers.get("content-type", "") else response.text
    line = " ".join(words.split()) or response.reason_phrase
    return line if len(line) <= 160 else f"{line[:160].rstrip()}…"


def _answer(choice: Mapping[str, Any]) -> Answer:
    """Read one choice of a response; an answer without log-probabilities has no steps."""
    log_probs = choice.get("logprobs") or {}
    if log_probs.get("content") is not None:
        steps = [_chat_step(entry) for entry in log_probs["content"]]
    else:
        steps = _legacy_steps(log_probs)
    steps = _prompt_steps(choice.get("prompt_logprobs"), choice.get("prompt_token_ids")) or steps
    if choice.get("token_ids") is not None and len(choice["token_ids"]) == len(steps):
        steps = [step._replace(token=int(token)) for step, token in zip(steps, choice["token_ids"], strict=True)]
    return Answer(steps, choice.get("finish_reason"), choice.get("stop_reason"))


def _chat_step(entry: Mapping[str, Any]) -> CompletionStep:
    top = {_token(other): _number(other["logprob"]) for other in entry.get("top_logprobs") or ()}
    return CompletionStep(_token(entry), _number(entry["logprob"]), _known(top))


def _legacy_steps(log_probs: Mapping[str, Any]) -> list[CompletionStep]:
    values = log_probs.get("token_logprobs") or []
    tokens = log_probs.get("tokens") or [None] * len(values)
    tops = log_probs.get("top_logprobs") or [None] * len(values)
    return [
        CompletionStep(
            _spelled(token), _number(value), _known({_spelled(t): _number(p) for t, p in (top or {}).items()})
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def _prompt_steps(
    entries: Sequence[Mapping[str, Any] | None] | None, ids: Sequence[int] | None
) -> list[CompletionStep]:
    """Read vLLM's own field: per place of the prompt token id → {"logprob": …}, the prompt's token among them."""
    steps = []
    for place, entry in enumerate(entries or ()):
        top = _known({int(token): _number(value["logprob"]) for token, value in (entry or {}).items()})
        token = int(ids[place]) if ids else None
        steps.append(CompletionStep(token, None if token is None else top.get(token), top))
    return steps


def _token(entry: Mapping[str, Any]) -> int | None:
    return int(entry["id"]) if entry.get("id") is not None else _spelled(entry.get("token"))


def _spelled(token: object) -> int | None:
    """Return the id in ``token_id:123``; None for a token that is spelled as text."""
    text = str(token)
    return int(text.removeprefix(_ID)) if text.startswith(_ID) and text.removeprefix(_ID).isdigit() else None


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(str(value))
    return -math.inf if number <= _LOWEST else number


def _known(top: Mapping[int | None, float | None]) -> dict[int, float]:
    return {token: value for token, value in top.items() if token is not None and value is not None}
