"""Runs an app on a socket of this machine until SIGINT or SIGTERM."""

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from freenergy.core.errors import UserError

_BACKLOG = 2048  # pending connections; beyond them our own queue answers
_GRACE_SECONDS = 5  # for answers in progress when the server is stopped


def run(app: FastAPI, *, host: str, port: int, words: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; port 0 picks a free one. Requests are not logged, since they can hold secrets."""
    with bound(host, port) as listener:
        where = address(listener)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        _Server(config, lambda: words(f"serving {app.title} at {where}")).run(sockets=[listener])


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


class _Server(uvicorn.Server):
    """Prints the URL once it accepts requests, and shuts down without noise."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then print the URL."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish answers at the first signal, exit at once at the second; neither is raised again."""
        self.force_exit = self.should_exit
        self.should_exit = True
