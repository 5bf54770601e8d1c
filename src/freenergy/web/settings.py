"""What a server allows, and whom."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import final

from fastapi import HTTPException, Request

from freenergy.core.errors import UserError
from freenergy.web.security import is_loopback, loopback_hosts, same_token

TOKEN_VARIABLE = "FREENERGY_TOKEN"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one question may ask for, and how much is done at once."""

    queue: int = 256  # jobs that wait or are worked on; one more is told to come again
    timeout_seconds: float = 120.0  # from being asked to the end of the answer
    candidates: int = 4096
    texts: int = 128  # of one question
    tokens: int = 2048  # of one text
    prompt_tokens: int = 8192
    rows: int = 256  # continuations in one call of the models
    least_rows: int = 32  # of one job in a call that it shares: fewer would read its prefix too often

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not (value := getattr(self, limit.name)) > 0:
                raise UserError(f"the limit of {limit.name} is {value}: set it above 0")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The name of the model, and who may ask it. The token is never shown."""

    name: str = "freenergy"  # of the joint model; its base is NAME-base
    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    folder: Path | None = None  # of the run, where there is one
    most_bytes: int = 2**20  # of a request
    most_prompts: int = 64  # of a request

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or not self.name.isprintable():
            raise UserError(f"the model's name is {self.name!r}: give a plain word with --name")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and len(self.token) >= 16):
            raise UserError("the token is too short or not plain: use 16 letters and digits or more")
        if self.token is None and not is_loopback(self.host):
            raise UserError(
                f"{self.host} can be reached by others and there is no token: put one into {TOKEN_VARIABLE} or a file "
                "(--token-file), or serve on 127.0.0.1"
            )

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The names that a request may use: on loopback this machine's own, elsewhere any."""
        return loopback_hosts() if is_loopback(self.host) else None

    @property
    def base_name(self) -> str:
        """The name under which the base alone is asked."""
        return f"{self.name}-base"

    async def authorise(self, request: Request) -> None:
        """A dependency of every route that asks the model: the bearer token, where one is set."""
        if self.token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not same_token(given.strip(), self.token):
            words = "the token is missing or wrong: send it as Authorization: Bearer TOKEN"
            raise HTTPException(401, words, {"WWW-Authenticate": "Bearer"})
