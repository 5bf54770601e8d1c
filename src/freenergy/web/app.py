"""The server: routes, errors in one shape, and what happens when a client leaves."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import JSONResponse, StreamingResponse

from freenergy import __version__
from freenergy.core.errors import UserError
from freenergy.text.choose_sampler import about_samplers
from freenergy.web import playground
from freenergy.web.clients import json_only, unless_gone
from freenergy.web.completions import Completion
from freenergy.web.dialect import CompletionRequest, Refusal, ScoreRequest, as_event, is_base_name, kind_of, malformed
from freenergy.web.metrics import Counting, Metrics
from freenergy.web.model_server import Busy, ModelServer, TooLong
from freenergy.web.security import error_body, secure
from freenergy.web.settings import ServerSettings
from freenergy.web.spelling import Spelling

T = TypeVar("T")

__all__ = ["create_app", "json_only", "unless_gone"]

_log = logging.getLogger("freenergy.web")


class Json(JSONResponse):
    """JSON in ASCII, so that half a character in a request cannot break the answer."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def create_app(server: ModelServer, settings: ServerSettings) -> FastAPI:
    """Return the API, the metrics and the playground of one residual model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await asyncio.to_thread(server.close)

    app = FastAPI(
        title=settings.name,
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load their scripts from elsewhere
        redoc_url=None,
        default_response_class=Json,
    )
    metrics = Metrics(server)
    app.include_router(_api(server, settings))
    app.include_router(_watching(server, settings, metrics))
    app.include_router(playground.router(server, settings))
    for kind in (UserError, RequestValidationError, Busy, TooLong, AnyHTTPException):
        app.add_exception_handler(kind, _error_response)
    secure(app, max_bytes=settings.max_bytes, hosts=settings.hosts)
    app.add_middleware(Counting, metrics=metrics)
    return app


def _api(server: ModelServer, settings: ServerSettings) -> APIRouter:
    """Return the routes for programs."""
    found = APIRouter(dependencies=[Depends(settings.authorise)])
    spelling, begun = Spelling(server.tokenizer), int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": begun, "owned_by": "freenergy"}

    @found.post("/v1/completions", dependencies=[Depends(json_only)])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, by the residual model or its base."""
        completion = await asyncio.to_thread(Completion.of, server, settings, spelling, body)
        if not body.stream:
            return Json(await unless_gone(request, completion.whole()))
        frames = completion.stream()
        first = await unless_gone(request, _first(frames))  # trouble before the first piece has a status of its own
        return StreamingResponse(_events(first, frames), media_type="text/event-stream")

    @found.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the residual model and its base."""
        return {"object": "list", "data": [card(settings.name), card(settings.base_name)]}

    @found.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return one of them."""
        is_base_name(name, settings)
        return card(name)

    @found.get("/v1/samplers")
    async def samplers() -> dict[str, Any]:
        """List the samplers that a request may name, and the settings of each; the default is the first."""
        return {"object": "list", "data": about_samplers(server.model)}

    @found.post("/score", dependencies=[Depends(json_only)])
    async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
        """Rank texts as what comes after a prefix, exactly."""
        most = server.limits.candidates
        if len(body.candidates) > most:
            raise Refusal(f"{len(body.candidates)} candidates: this server takes 1 to {most}", param="candidates")
        await asyncio.to_thread(server.encode, body.prefix)
        work = partial(server.model.score, body.prefix, body.candidates, ends=body.ends)
        return (await unless_gone(request, server.call(work))).to_json()

    return found


def _watching(server: ModelServer, settings: ServerSettings, metrics: Metrics) -> APIRouter:
    """Return the routes for those who look after the server."""
    found = APIRouter()

    @found.get("/health")
    async def health() -> Response:
        """Return whether it lives; asks for no token, since load balancers have none."""
        uptime, is_alive = time.monotonic() - server.begun, server.is_alive
        told = {
            "status": "ok" if is_alive else "stopped",
            "model": settings.name,
            "queue": server.queue,
            "uptime_seconds": round(uptime, 1),
        }
        return Json(told, 200 if is_alive else 503)

    @found.get("/metrics", dependencies=[Depends(settings.authorise)])
    async def numbers() -> Response:
        """Return counts in Prometheus's text form."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return found


async def _first(frames: AsyncIterator[T]) -> T:
    return await anext(frames)


async def _events(first: dict[str, Any], frames: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events; an error after the first is an event too, since the status is out."""
    try:
        yield as_event(first)
        async for frame in frames:
            yield as_event(frame)
        yield as_event("[DONE]")
    except (UserError, Busy, TooLong) as error:
        yield as_event(_status_and_body(error)[1])
    except Exception:
        _log.exception("a stream failed")
        yield as_event(error_body("the server failed on this request, and has logged why", kind="server_error"))


async def _error_response(_: Request, error: Exception) -> Response:
    """Return an error in the dialect."""
    status, body = _status_and_body(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, Busy):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return Json(body, status, headers)


def _status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, RequestValidationError):
        error = malformed(error)
    if isinstance(error, AnyHTTPException):
        return error.status_code, error_body(str(error.detail), kind=kind_of(error.status_code))
    statuses: dict[Callable[..., Exception], int] = {Busy: 429, TooLong: 408}
    status = statuses.get(type(error), getattr(error, "status", 400))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return status, error_body(str(error), kind=kind_of(status), param=param, code=code)
