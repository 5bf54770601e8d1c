"""What stands before every page and every answer: size, host, headers, tokens.

A server on loopback is reached by any page that the user's browser shows, if that page's own name is made to point at
127.0.0.1 (DNS rebinding). So the name in the request must be one of this machine's. Bodies are counted while they
arrive, since a content-length need not be true. What goes wrong inside is logged here and told to nobody.
"""

import ipaddress
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any, final

from fastapi import FastAPI, HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_log = logging.getLogger("freenergy.web")


def secure(app: FastAPI, *, max_bytes: int, hosts: Sequence[str] | None) -> None:
    """Refuse bodies beyond ``max_bytes`` and names that are not in ``hosts`` (None: any); headers on every answer."""
    known = None if hosts is None else frozenset(host.lower() for host in hosts)
    app.add_middleware(_Guard, max_bytes=max_bytes, hosts=known)


def loopback_hosts() -> tuple[str, ...]:
    """Return the names under which this machine calls itself; the port does not matter."""
    return ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether nobody else can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def new_token() -> str:
    """256 bits that nobody guesses."""
    return secrets.token_urlsafe(32)


def same_token(a: str, b: str) -> bool:
    """Equal or not, in a time that does not tell how much of them is."""
    return secrets.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode("utf-8", "surrogatepass"))


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in the dialect of OpenAI's servers."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@final
class _Guard:
    """The middleware; plain ASGI, so that a stream passes piece by piece and a client that leaves is noticed."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, hosts: frozenset[str] | None) -> None:
        self.app, self.max_bytes, self.hosts = app, max_bytes, hosts

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

        refused = self._refused(Headers(scope=scope))
        if refused is not None:
            return await _answer(guarded, *refused)
        try:
            await self.app(scope, self._counted(receive), guarded)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise  # the server cuts the connection: half an answer must not look whole
            await _answer(guarded, 500, "the server failed on this request, and has logged why", "server_error")

    def _refused(self, headers: Headers) -> tuple[int, str, str] | None:
        """Status, sentence and kind of what is wrong before anything is read."""
        named = [_without_port(host) for host in headers.getlist("host")]
        if self.hosts is not None and (len(named) != 1 or named[0] not in self.hosts):
            words = f"the request's Host is none of {', '.join(sorted(self.hosts))}: use one of these addresses"
            return 400, words, "invalid_request_error"
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return 400, "the content-length is not a number: leave it to your HTTP library", "invalid_request_error"
        if len(length) > 18 or int(length) > self.max_bytes:
            return 413, _too_large(self.max_bytes), "invalid_request_error"
        return None

    def _counted(self, receive: Receive) -> Receive:
        """Return the same messages, until there are too many bytes of them."""
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
    """Return the name in a Host header, in small letters; an IPv6 address keeps its brackets."""
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdigit() else host.strip().lower()


async def _answer(send: Send, status: int, message: str, kind: str) -> None:
    body = json.dumps(error_body(message, kind=kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
