"""What clients of OpenAI-style servers send, and which of it is refused.

Knobs that would change the law in a way that this server does not know are accepted at rest and refused otherwise: a
text from another law than the one asked for would be worse than none. Fields that vLLM and llama.cpp add are known as
far as ``lm.remote`` sends them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field

from freenergy.core.errors import UserError
from freenergy.core.scored import Law
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers.registry import choose_sampler, sampler_names
from freenergy.samplers.sampled import Sampler
from freenergy.text.model import ResidualModel
from freenergy.text.texts import Texts, diagnosis, finite
from freenergy.web.settings import ServerSettings

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Setting = bool | int | float | str | None
Stop = Annotated[str, Field(min_length=1, max_length=1000)]

# what bends the law elsewhere; the defaults below are at rest
_AT_REST = ("presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty", "min_p", "typical_p",
            "xtc_probability", "dry_multiplier", "logit_bias", "suffix")  # fmt: skip


class Refusal(UserError):  # noqa: N818
    """An error that is sent in OpenAI's format."""

    def __init__(self, sentence: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code


class Body(BaseModel):
    """Strict JSON: no unknown fields, no numbers in quotes, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of the last event of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: never added here


class CompletionRequest(Body):
    """The body of /v1/completions; null fields count as missing."""

    model: str = Field(description="The name of the residual model, or NAME-base for its base.")
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = ""
    n: int | None = Field(None, ge=1, description="Texts for each prompt.")
    best_of: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0, description="Default: as the energy was trained.")
    temperature: float | None = Field(None, ge=0, le=100, description="0: the likeliest token at each step.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: all tokens.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    logprobs: int | None = Field(None, ge=0, description="Number of likeliest tokens to return per position.")
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    candidates: int | None = Field(None, ge=1, description="Short for the setting of this name.")
    sampler: str | None = Field(None, max_length=100, description="A name from /v1/samplers.")
    settings: dict[str, Setting] | None = Field(
        None, description="Settings of the sampler, as /v1/samplers lists them."
    )
    law: Law | None = Field(None, description="Short for the setting of this name.")
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, description="Only with echo and logprobs, which return the same.")
    user: str | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    repetition_penalty: float | None = 1
    repeat_penalty: float | None = 1
    min_p: float | None = 0
    typical_p: float | None = 1
    xtc_probability: float | None = 0
    dry_multiplier: float | None = 0
    logit_bias: dict[str, float] | None = {}
    suffix: str | None = ""

    def check(self) -> None:
        """Refuse unsupported options instead of ignoring them."""
        for name in _AT_REST:
            at_rest = type(self).model_fields[name].default
            if getattr(self, name) not in (None, at_rest):
                raise Refusal(f"{name} is not known to this server: leave it out, or at {at_rest!r}", param=name)
        if self.best_of not in (None, self.n or 1):
            words = "best_of must be n: the residual model weighs candidates itself, so ask for more candidates"
            raise Refusal(words, param="best_of")
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options has no meaning without stream: leave it out", param="stream_options")
        if self.prompt_logprobs is not None and not (self.echo and self.logprobs is not None):
            words = "prompt_logprobs is not supported without echo and logprobs, which return the same"
            raise Refusal(words, param="prompt_logprobs")

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, each a text or its tokens."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and not prompt:
            raise Refusal("prompt is an empty list: give a text, or '' for a new document", param="prompt")
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    def truncation(self, vocab_size: int) -> Truncation:
        """Return the proposal; temperature 0 is the likeliest token."""
        if self.temperature == 0:
            return Truncation(top_k=1)
        top_k = self.top_k if self.top_k is not None and 0 < self.top_k < vocab_size else None
        top_p = self.top_p if self.top_p is not None and self.top_p < 1 else None
        return Truncation(
            temperature=1.0 if self.temperature is None else float(self.temperature), top_k=top_k, top_p=top_p
        )

    def sampler_of(self, model: ResidualModel, candidates: int) -> Sampler:
        """The sampler that was asked for; ``candidates`` is what resampling has where the request says nothing."""
        truncation, settings = self.truncation(model.base.vocab_size), self.settings or {}
        short: dict[str, Any] = {"candidates": self.candidates, "law": self.law}
        short |= {name: value for name, value in asdict(truncation).items() if value != getattr(ANCESTRAL, name)}
        is_resampling = (self.sampler or sampler_names(model.has_energy)[0]) == "resampling"
        if is_resampling and self.candidates is None and "candidates" not in settings:
            # of the likeliest token at each step all candidates would be the same
            short["candidates"] = 1 if truncation.top_k == 1 else candidates
        return choose_sampler(model.has_energy, self.sampler, settings, short)

    def stops(self) -> tuple[str, ...]:
        """Return the strings that end a text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ScoreRequest(Body):
    """The body of /score."""

    prefix: str = ""
    candidates: list[str] = Field(min_length=1, description="Texts to be ranked as what comes after the prefix.")
    ends: bool = Field(False, description="Score each as a text that ends there (with EOS).")


def kind_of(status: int) -> str:
    """Return the type of an error, by its status."""
    kinds = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def malformed(error: RequestValidationError) -> Refusal:
    """Return one sentence for a body that does not fit its model; what was sent is not repeated."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal("the body is not JSON: send an object as application/json", code="json_invalid")
    place = [str(part) for part in first["loc"] if part != "body"]
    if place[:1] == ["prompt"]:  # otherwise one error per kind of prompt
        words = "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
        return Refusal(words, param="prompt", code=first["type"])
    if place[:1] == ["stop"]:
        words = "stop must be a text of up to 1000 characters, or a list of up to four"
        return Refusal(words, param="stop", code=first["type"])
    where = place[0] if place else "the body"
    words = first["msg"][:1].lower() + first["msg"][1:]
    return Refusal(f"{where[:100]}: {words}", param=place[0][:100] if place else None, code=first["type"])


def is_base_name(model: str, settings: ServerSettings) -> bool:
    """Whether a request names the base; refuse any name that is neither the model's nor its base's."""
    if model in (settings.name, settings.base_name):
        return model == settings.base_name
    words = f"there is no model {model[:100]!r} here: use {settings.name} or {settings.base_name}"
    raise Refusal(words, status=404, param="model", code="model_not_found")


def as_event(content: dict[str, Any] | str) -> str:
    """Return a line of server-sent events."""
    return f"data: {content if isinstance(content, str) else json.dumps(content, allow_nan=False)}\n\n"


def evidence(found: Texts) -> dict[str, Any]:
    """Return the numbers of the choice; of several chunks the worst, and log Ẑ of none."""
    steps = [diagnosis(step) for step in found.steps]
    worst = {"ess": min, "largest_share": max, "k_hat": max, "distance": max, "covered": min}
    numbers: dict[str, Any] = {"steps": len(steps), "base_tokens": sum(step["base_tokens"] for step in steps)}
    for name, pick in worst.items():
        known = [step[name] for step in steps if step.get(name) is not None]
        numbers[name] = finite(pick(known)) if known else None
    for name in ("log_partition", "standard_error"):
        numbers[name] = steps[0].get(name) if len(steps) == 1 else None
    return numbers | {"notes": found.all_notes()}
