"""Settings of the server: limits per request, and who may send requests."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import final

from fastapi import HTTPException, Request

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.web.security import LOOPBACK_HOSTS, NO_TOKEN, is_loopback, same_token

TOKEN_VARIABLE = "FREENERGY_TOKEN"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits per request, and batch sizes."""

    queue: int = 256  # requests waiting or in progress; further ones get HTTP 503
    timeout_seconds: float = 120.0  # from the request to the end of the answer
    candidates: int = 4096
    texts: int = 128  # per request
    tokens: int = 2048  # per text
    prompt_tokens: int = 8192
    draw_tokens: int = 2**24  # of all candidates of a text
    score_tokens: int = 2**16  # of all candidates of /score
    score_characters: int = 2**22  # of all candidates of /score, each with its prefix
    cells: int = 2**11  # tokens with padding per call of the models, where given texts are scored
    rows: int = 256  # continuations per call of the models
    least_rows: int = 32  # per request in a shared batch: fewer would encode its prefix too often

    def __post_init__(self) -> None:
        check_range(self, *(limit.name for limit in fields(self)), above=0, section="limits.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The name of the model, and who may use it. The token is never shown."""

    name: str = "freenergy"  # of the residual model; its base is served as NAME-base
    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    folder: Path | None = None  # of the run, if there is one
    max_bytes: int = 2**20  # per request
    max_prompts: int = 64  # per request

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or not self.name.isprintable():
            raise UserError(f"the model's name is {self.name!r}: give a printable name with --name")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and len(self.token) >= 16):
            raise UserError("the token is too short or not printable ASCII: use at least 16 letters and digits")
        if self.token is None and not is_loopback(self.host):
            raise UserError(
                f"{self.host} is reachable from other machines and no token is set: set {TOKEN_VARIABLE} or a file "
                "(--token-file), or serve on 127.0.0.1"
            )

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The values of the Host header that are accepted: on loopback this machine's names, elsewhere any."""
        return LOOPBACK_HOSTS if is_loopback(self.host) else None

    @property
    def base_name(self) -> str:
        """The model name of the base LM alone."""
        return f"{self.name}-base"

    def is_allowed(self, authorization: str) -> bool:
        """Whether an Authorization header holds the token, if one is set."""
        kind, _, given = authorization.partition(" ")
        return self.token is None or (kind.lower() == "bearer" and same_token(given.strip(), self.token))

    async def authorise(self, request: Request) -> None:
        """FastAPI dependency of every route that uses the model."""
        if not self.is_allowed(request.headers.get("authorization", "")):
            raise HTTPException(401, NO_TOKEN, {"WWW-Authenticate": "Bearer"})
