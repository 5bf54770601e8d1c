"""Servers of a residual model of bytes (tests/helpers/byte_server.py)."""

from byte_server import joint, make_joint, serve, server, serving  # noqa: F401
