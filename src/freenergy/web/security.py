"""Middleware in front of every route: body size, Host header, security headers, tokens.

A server on loopback is reached by any page that the user's browser shows, if that page's own name is made to point at
127.0.0.1 (DNS rebinding). So the name in the request must be one of this machine's. Bodies are counted while they
arrive, since a content-length need not be true. Internal errors are logged here and never shown to clients.
"""

import asyncio
import ipaddress
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, final

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # names of this machine in a Host header, without port
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_TOKEN = "the token is missing or wrong: send it as Authorization: Bearer TOKEN"
_GONE = 499  # never received by the client; only for the metrics
_log = logging.getLogger("freenergy.web")
T = TypeVar("T")


def secure(
    app: FastAPI,
    *,
    max_bytes: int,
    hosts: Sequence[str] | None,
    is_allowed: Callable[[str], bool] = lambda authorization: True,
) -> None:
    """Add the middleware: refuses bodies beyond ``max_bytes`` and Host headers not in ``hosts`` (None: any).

    A request with a body is refused before the body is read unless ``is_allowed`` says yes to its Authorization header.
    """
    known = None if hosts is None else frozenset(host.lower() for host in hosts)
    app.add_middleware(_Guard, max_bytes=max_bytes, hosts=known, is_allowed=is_allowed)


def is_loopback(host: str) -> bool:
    """Whether a server that listens there is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def same_token(a: str, b: str) -> bool:
    """Compare two tokens in constant time."""
    return secrets.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode("utf-8", "surrogatepass"))


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in the dialect of OpenAI's servers."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def json_only(request: Request) -> None:
    """FastAPI dependency that refuses other content types: a form on a foreign page could send one (CSRF)."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be application/json: say so in the content-type")
    try:
        json.loads(await request.body(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return  # not JSON, of which the parser of the route says more


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a key twice: two readers of it could take different values."""
    if len(found := dict(pairs)) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise HTTPException(400, f"the key {twice[:100]!r} stands twice in the body: send it once")
    return found


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of some work, which is cancelled when the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(_GONE, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@final
class _Guard:
    """The middleware; plain ASGI, so that streams are not buffered and a disconnected client is noticed."""

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, hosts: frozenset[str] | None, is_allowed: Callable[[str], bool]
    ) -> None:
        self.app, self.max_bytes, self.hosts, self.is_allowed = app, max_bytes, hosts, is_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        has_begun = False

        async def guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            status, words, more = refused
            kind = {401: "authentication_error", 503: "server_error"}.get(status, "invalid_request_error")
            return await JSONResponse(error_body(words, kind=kind), status, more)(scope, receive, guarded)
        try:
            await self.app(scope, self._counted(receive), guarded)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise  # the server closes the connection: a partial answer must not look complete
            error = error_body("the server failed on this request, and has logged why", kind="server_error")
            await JSONResponse(error, 500)(scope, receive, guarded)

    def _refused(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """Return status, message and headers of an error that is visible before the body is read."""
        headers, close = Headers(scope=scope), {"Connection": "close"}
        if getattr(getattr(scope.get("app"), "state", None), "is_draining", False):
            return 503, "the server is being stopped: try again in a few seconds", close | {"Retry-After": "5"}
        named = [_without_port(host) for host in headers.getlist("host")]
        if self.hosts is not None and (len(named) != 1 or named[0] not in self.hosts):
            words = f"the Host header is not one of {', '.join(sorted(self.hosts))}: use one of these addresses"
            return 400, words, {}
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return 400, "the content-length is not a number: leave it to your HTTP library", close
        if "content-length" in headers and "transfer-encoding" in headers:
            return 400, "the request has a content-length and a transfer-encoding: send one of the two", close
        if len(length) > 18 or int(length) > self.max_bytes:
            return 413, _too_large(self.max_bytes), {}
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            return 415, "compressed bodies are not read: send it without a content-encoding", {}
        has_body = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if has_body and not self.is_allowed(headers.get("authorization", "")):
            return 401, NO_TOKEN, {"WWW-Authenticate": "Bearer"}
        return None

    def _counted(self, receive: Receive) -> Receive:
        """Pass on the messages of the body until they exceed the size limit."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, _too_large(self.max_bytes))
            return message

        return counted


def _too_large(max_bytes: int) -> str:
    return f"the request is larger than {max_bytes:,} bytes: send less"


def _without_port(host: str) -> str:
    """Return the name in a Host header, in lower case; an IPv6 address keeps its brackets."""
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdigit() else host.strip().lower()
