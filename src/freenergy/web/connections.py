"""Connections under a time limit: what uvicorn's settings leave open.

    state        limit
    header       from the first moment until the header is complete
    body         from the header until the body is complete
    writing      while the client reads less than ``min_bytes`` of its answer per ``write_seconds``
    idle         between two requests (uvicorn's ``timeout_keep_alive``)

There are at most ``max_connections``. A new one beyond them takes the place of the one that has waited longest for a
header; where all are in use, a reserve remains whose connections may ask for /health only. So neither connections that
send nothing nor clients that read nothing keep others out.
"""

import asyncio
import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, cast, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from freenergy.core.checks import check_range

_HEALTH = "/health"
_FILES = 64  # kept for everything but connections


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SocketLimits:
    """Limits of connections."""

    max_connections: int = 1024  # at most, and fewer where the process may not open that many files
    reserve: int = 16  # further connections, for /health only
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    idle_seconds: float = 5.0
    min_bytes: int = 4096  # that a client must read per ``write_seconds``
    check_seconds: float = 0.5  # between two looks at all connections

    def __post_init__(self) -> None:
        check_range(self, *(limit.name for limit in fields(self)), above=0, section="sockets.")

    @property
    def connections(self) -> int:
        """The number of connections besides the reserve that the process's limit of open files allows."""
        try:
            import resource
        except ModuleNotFoundError:  # Windows has no such limit
            return self.max_connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = self.max_connections if files == resource.RLIM_INFINITY else files - _FILES - self.reserve
        return max(8, min(self.max_connections, allowed))


@final
class Connection(H11Protocol):
    """A connection that knows since when it is in its state."""

    def __init__(self, *arguments: Any, limits: SocketLimits, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.limits, self.is_reserve = limits, False
        self._state, self._since = "header", time.monotonic()
        self._unsent, self._sending_since = 0, self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, that of another one, or one of the reserve; else close."""
        super().connection_made(transport)
        others = [each for each in cast("set[Connection]", self.connections) if each is not self]
        places = [each for each in others if not each.is_reserve]
        if len(places) < self.limits.connections:
            return
        waiting = [each for each in places if each.state in ("header", "idle")]
        if waiting:
            min(waiting, key=lambda each: each._since).transport.abort()
        elif len(others) - len(places) < self.limits.reserve:
            self.is_reserve, self.app = True, _HealthOnly(self.app)
        else:
            transport.abort()

    @property
    def state(self) -> str:
        """Return header, body, answer or idle; the time in the state begins when it changes."""
        found = self._found_state()
        if found != self._state:
            self._state, self._since = found, time.monotonic()
        return found

    def _found_state(self) -> str:
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.cycle is not None and not self.cycle.response_complete:
            return "answer"
        return "header" if self.cycle is None or self.conn.trailing_data[0] else "idle"

    def is_overdue(self, now: float) -> bool:
        """Whether a limit has passed."""
        limits, unsent = self.limits, self.transport.get_write_buffer_size()
        if self._unsent - unsent >= limits.min_bytes or not unsent or not self._unsent:
            self._unsent, self._sending_since = unsent, now
        self._unsent = max(self._unsent, unsent)
        if unsent:
            return now - self._sending_since > limits.write_seconds
        allowed = {"header": limits.header_seconds, "body": limits.body_seconds}
        return now - self._since > allowed[state] if (state := self.state) in allowed else False

    def end(self) -> None:
        """Answer 408 where a request has begun, and close."""
        is_answered = self.cycle is None or self.cycle.response_started
        if not is_answered and not self.transport.is_closing():
            self._answer(408, "the request did not arrive in time: send it again")
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the dialect's form."""
        self._answer(400, "this is not a valid HTTP request: use an HTTP library")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered as if no upgrade had been asked for."""

    def _answer(self, status: int, words: str) -> None:
        """Write a short answer without the application."""
        content = error_content(status, words)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer has begun
            self.transport.abort()
        if self.cycle is not None:
            self.cycle.response_started = self.cycle.response_complete = self.cycle.disconnected = True
            self.cycle.message_event.set()


def error_content(status: int, words: str) -> bytes:
    """Return an error in the dialect of OpenAI's servers."""
    kind = "server_error" if status >= 500 else "timeout_error" if status == 408 else "invalid_request_error"
    return json.dumps({"error": {"message": words, "type": kind, "param": None, "code": None}}).encode()


@final
class _HealthOnly:
    """An application that answers /health, and 503 to all else."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == _HEALTH:
            await self._app(scope, receive, send)
            return
        content = error_content(503, "all connections are in use: try again soon")
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"5"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def watch(connections: Collection[Any], limits: SocketLimits) -> None:
    """Close connections whose time is up, until cancelled."""
    while True:
        await asyncio.sleep(limits.check_seconds)
        now = time.monotonic()
        for each in [each for each in connections if isinstance(each, Connection)]:
            if each.is_overdue(now):
                each.end()


@final
class AtMost(logging.Filter):
    """Passes at most ``number`` records of a logger per minute, and then says once how it goes on."""

    def __init__(self, number: int = 60) -> None:
        super().__init__()
        self._number, self._minute, self._seen = number, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._seen = minute, 0
        self._seen += 1
        if self._seen == self._number:
            record.msg, record.args = f"{record.getMessage()} (further messages of this minute are left out)", ()
        return self._seen <= self._number
