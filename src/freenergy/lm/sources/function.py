"""Texts from a Python function: ``f(prefix, seed) → text``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from freenergy.core.errors import UserError
from freenergy.lm.sources.protocol import DrawnText, TextRequest


@final
@dataclass(frozen=True, slots=True)
class FromFunction:
    """Calls ``function(prefix, seed)`` for each text."""

    function: Callable[[str, int], str]
    name: str

    def draw(self, requests: Sequence[TextRequest]) -> list[DrawnText]:
        """Return one text per request; whatever the function raises becomes one sentence."""
        return [DrawnText(self._text(request)) for request in requests]

    def part(self, split: str) -> "FromFunction":
        """Return itself: it writes as many texts as it is asked for."""
        return self

    def _text(self, request: TextRequest) -> str:
        try:
            text = self.function(request.prefix, request.seed)
        except UserError:  # it cannot be imported, or is not trusted
            raise
        except Exception as error:
            raise UserError(
                f"the function {self.name} failed on the prefix {request.prefix[-40:]!r} with seed {request.seed} "
                f"({type(error).__name__}: {error}): fix it, and run the stage again"
            ) from error
        if not isinstance(text, str):
            raise UserError(f"the function {self.name} returned a {type(text).__name__}: let it return one text")
        return text
