"""Which bodies a client may send, and what happens when it disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

T = TypeVar("T")
_GONE = 499  # never received by the client; only for the metrics


async def json_only(request: Request) -> None:
    """FastAPI dependency that refuses other content types: a form on a foreign page could send one (CSRF)."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be application/json: say so in the content-type")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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
