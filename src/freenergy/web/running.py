"""Runs an app on a socket of this machine until SIGINT or SIGTERM.

On a signal it accepts no more connections; requests in progress have a grace period, and whatever is not answered by
then is answered 503 with Retry-After (``app.state.drain``), so that no client sees a broken answer.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast, final

import uvicorn
from fastapi import FastAPI

from freenergy.core.errors import UserError
from freenergy.web.connections import AtMost, Connection, SocketLimits, watch

_BACKLOG = 128  # pending connections; the kernel refuses further ones for a moment
_GRACE_SECONDS = 5.0  # for requests in progress when the server is stopped
_FLUSH_SECONDS = 2.0  # until the last answers are read
_LOGGERS = ("freenergy.web", "uvicorn.error", "asyncio")


def run(
    app: FastAPI,
    *,
    host: str,
    port: int,
    words: Callable[[str], None],
    limits: SocketLimits | None = None,
    proxies: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; port 0 picks a free one. Requests are not logged, since they can hold secrets.

    ``proxies`` are the addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.
    """
    with bound(host, port) as listener, bounded_logs():
        where = address(listener)
        server = LimitedServer(app, limits or SocketLimits(), proxies=proxies)
        server.on_start = lambda: words(f"serving {app.title} at {where}")
        server.run(sockets=[listener])


@contextmanager
def bounded_logs() -> Iterator[None]:
    """Write at most 60 messages per minute and logger, whatever clients send."""
    own = [(logging.getLogger(name), AtMost()) for name in _LOGGERS]
    for logger, at_most in own:
        logger.addFilter(at_most)
    try:
        yield
    finally:
        for logger, at_most in own:
            logger.removeFilter(at_most)


def checked_proxies(proxies: Sequence[str]) -> list[str]:
    """Return addresses or networks of proxies; raise ``UserError`` for what is neither: "*" would believe anybody."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            words = "give its address or network, as in --trust-proxy 127.0.0.1"
            raise UserError(f"the proxy {proxy!r} is not an IP address: {words}") from None
    return list(proxies)


def check_port(port: int) -> None:
    """Raise ``UserError`` if the port is out of range."""
    if not 0 <= port < 2**16:
        raise UserError(f"the port is {port}: use one from 0 (any free port) to 65535")


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port."""
    check_port(port)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"the host {host!r} cannot be found ({error}): give an address of this machine") from None
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise UserError(f"{host} port {port} cannot be used ({why}): choose another port with --port") from None
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@final
class LimitedServer(uvicorn.Server):
    """uvicorn with limits on connections, and an end that answers every client."""

    def __init__(
        self, app: FastAPI, limits: SocketLimits, *, grace_seconds: float = _GRACE_SECONDS, proxies: Sequence[str] = ()
    ) -> None:
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(Connection, limits=limits)),
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, round(limits.idle_seconds)),
            timeout_graceful_shutdown=round(grace_seconds + 2 * _FLUSH_SECONDS + 1),
        )
        super().__init__(config)
        self._state, self._limits, self._grace_seconds = app.state, limits, grace_seconds
        self._watch: asyncio.Task[None] | None = None
        self.on_start: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._watch = asyncio.create_task(watch(self.server_state.connections, self._limits))
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, finish those in progress, and after the grace period answer the others 503."""
        self._state.is_draining = True
        loop, drain = asyncio.get_running_loop(), getattr(self._state, "drain", lambda: None)
        timers = [
            loop.call_later(self._grace_seconds, drain),
            loop.call_later(self._grace_seconds + _FLUSH_SECONDS, self._close_all),
        ]
        try:
            await super().shutdown(sockets=sockets)
        finally:
            for timer in timers:
                timer.cancel()
            if self._watch is not None:
                self._watch.cancel()

    def _close_all(self) -> None:
        for each in list(self.server_state.connections):
            cast(Connection, each).transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish answers at the first signal, exit at once at the second; neither is raised again."""
        self.force_exit = self.should_exit
        self.should_exit = True
