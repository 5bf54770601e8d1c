"""Texts from an OpenAI-style endpoint that gives no log-probabilities.

    POST …/chat/completions {messages, seed, …}  →  choices[0].message.content        or …/completions, choices[0].text

One request per text, each with a seed of its own; a server that ignores seeds draws other texts the next time, and the
store keeps those that were drawn.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, final

import httpx

from freenergy.core.errors import UserError
from freenergy.lm.completions import Completions
from freenergy.lm.remote import API_KEY
from freenergy.lm.sources.protocol import DrawnText, TextRequest
from freenergy.lm.sources.settings import EndpointSource


@final
class FromEndpoint:
    """Asks the server that the settings describe."""

    def __init__(self, settings: EndpointSource) -> None:
        self.settings = settings
        self.server = Completions(
            url=settings.url,
            model=settings.model,
            api_key=os.environ.get(API_KEY),
            timeout_seconds=settings.timeout_seconds,
            path="chat/completions" if settings.chat else "completions",
        )

    def draw(self, requests: Sequence[TextRequest]) -> list[DrawnText]:
        """Return one text per request, asked for in parallel."""
        with self.server.client() as client, ThreadPoolExecutor(self.settings.parallel) as pool:
            return list(pool.map(partial(self._draw, client), requests))

    def part(self, split: str) -> "FromEndpoint":
        """Return itself: it writes as many texts as it is asked for."""
        return self

    def _draw(self, client: httpx.Client, request: TextRequest) -> DrawnText:
        response = self.server.post(client, self._body(request))
        try:
            [choice] = response.json()["choices"]
            text = choice["message"]["content"] if self.settings.chat else choice["text"]
            return DrawnText(_checked(text), choice.get("finish_reason") != "length")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            dialect = "chat completion" if self.settings.chat else "completion"
            raise UserError(
                f"the server at {self.server.shown} answered with something that is not a {dialect} of one text "
                f"({type(error).__name__}): check the address, and whether chat should be "
                f"{str(not self.settings.chat).lower()}"
            ) from error

    def _body(self, request: TextRequest) -> dict[str, Any]:
        settings = self.settings
        asked = settings.prompt.replace("{prefix}", request.prefix)
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        what = {"messages": [*system, {"role": "user", "content": asked}]} if settings.chat else {"prompt": asked}
        knobs = {"temperature": settings.temperature, "top_p": settings.top_p, "model": settings.model or None}
        given = {name: value for name, value in knobs.items() if value is not None}
        return {**what, **given, "seed": request.seed, "max_tokens": settings.max_tokens or 2 * request.length}


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError
    return text
