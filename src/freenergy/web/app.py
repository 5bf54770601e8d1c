"""The server: routes, errors in one shape, what happens when a client leaves, and what a Prometheus server reads."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freenergy import __version__
from freenergy.core.errors import UserError
from freenergy.samplers.registry import about_samplers
from freenergy.web import playground
from freenergy.web.completions import Completion
from freenergy.web.dialect import CompletionRequest, Refusal, ScoreRequest, as_event, is_base_name, kind_of, malformed
from freenergy.web.model_server import ModelServer, NotServed
from freenergy.web.security import error_body, json_only, secure, unless_gone
from freenergy.web.settings import ServerSettings
from freenergy.web.spelling import Spelling

_log = logging.getLogger("freenergy.web")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def as_json(content: Any) -> bytes:
    """Return JSON in ASCII, so that half a character in a request cannot break the answer."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Json(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return as_json(content)


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
    registry = CollectorRegistry()  # its own, so that two servers in one process do not interfere
    registry.register(_OfServer(server))
    app.include_router(_api(server, settings, registry))
    app.include_router(playground.router(server, settings))

    @app.get("/health")
    async def health() -> Response:
        """Return whether it lives; asks for no token, since load balancers have none."""
        uptime, is_alive = time.monotonic() - server.begun, server.turns.is_alive
        told = {"status": "ok" if is_alive else "stopped", "model": settings.name, "queue": len(server.turns)}
        return Json(told | {"uptime_seconds": round(uptime, 1)}, 200 if is_alive else 503)

    for kind in (UserError, RequestValidationError, NotServed, AnyHTTPException):
        app.add_exception_handler(kind, _error_response)
    app.state.drain = server.turns.drain
    secure(app, max_bytes=settings.max_bytes, hosts=settings.hosts, is_allowed=settings.is_allowed)
    app.add_middleware(_Counting, registry=registry)
    return app


def _api(server: ModelServer, settings: ServerSettings, registry: CollectorRegistry) -> APIRouter:
    """Return the routes for programs, which ask for the token."""
    found = APIRouter(dependencies=[Depends(settings.authorise)])
    spelling, begun = Spelling(server.tokenizer), int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": begun, "owned_by": "freenergy"}

    @found.post("/v1/completions", dependencies=[Depends(json_only)])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, by the residual model or its base."""
        completion = await asyncio.to_thread(Completion.of, server, settings, spelling, body)
        if not body.stream:
            answer = await unless_gone(request, completion.whole())
            return Response(await asyncio.to_thread(as_json, answer), media_type="application/json")
        frames = completion.stream()
        first = await unless_gone(request, anext(frames))  # trouble before the first piece has a status of its own
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
        return {"object": "list", "data": about_samplers(server.model.has_energy)}

    @found.post("/score", dependencies=[Depends(json_only)])
    async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
        """Rank texts as what comes after a prefix, exactly."""
        try:
            await asyncio.to_thread(server.check_score, body.prefix, body.candidates)
            work = partial(server.score, body.prefix, body.candidates, body.ends)
            return (await unless_gone(request, server.call(work))).to_json()
        except UserError as error:
            raise Refusal(str(error), param="candidates") from None

    found.post("/v1/chat/completions", include_in_schema=False)(_no_chat)

    @found.get("/metrics")
    async def numbers() -> Response:
        """Return counts in Prometheus's text form."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return found


async def _no_chat() -> Response:
    """Say that this server continues texts and does not chat."""
    raise Refusal("this server has no chat: send the text to /v1/completions as prompt", status=404)


async def _events(first: dict[str, Any], frames: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events; an error after the first is an event too, since the status is out."""
    try:
        yield as_event(first)
        async for frame in frames:
            yield as_event(frame)
        yield as_event("[DONE]")
    except (UserError, NotServed) as error:
        yield as_event(_status_and_body(error)[1])
    except Exception:
        _log.exception("a stream failed")
        yield as_event(error_body("the server failed on this request, and has logged why", kind="server_error"))


async def _error_response(_: Request, error: Exception) -> Response:
    status, body = _status_and_body(error)
    return Json(body, status, getattr(error, "headers", None))


def _status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, RequestValidationError):
        error = malformed(error)
    if isinstance(error, AnyHTTPException):
        return error.status_code, error_body(str(error.detail), kind=kind_of(error.status_code))
    status, param, code = (getattr(error, name, None) for name in ("status", "param", "code"))
    status = status or 400
    return status, error_body(str(error), kind=kind_of(status), param=param, code=code)


@final
class _Counting:
    """Middleware that counts answers by the route's pattern, never by the path: paths are without number."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry) -> None:
        words = "Requests that were answered."
        self.app = app
        self.requests = Counter("freenergy_requests", words, ["route", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self.requests.labels(route=route, status=str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)


@final
class _OfServer(Collector):
    """Reads the server's counts at the moment in which somebody asks."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        counts = self.server.counts
        yield GaugeMetricFamily("freenergy_queue", "Jobs that wait or are worked on.", value=len(self.server.turns))
        for name, words in {
            "asked": "Jobs that stood in the row.",
            "finished": "Jobs that came to their end.",
            "failed": "Jobs that ended by an error.",
            "cancelled": "Jobs whose client went away or had waited too long.",
            "refused": "Requests for which the row was too long.",
            "too_long": "Jobs that were not done in time.",
        }.items():
            yield CounterMetricFamily(f"freenergy_jobs_{name}", words, value=getattr(counts, name))
        yield CounterMetricFamily("freenergy_tokens_drawn", "Tokens drawn from the base.", value=counts.tokens)
        yield CounterMetricFamily("freenergy_waiting_seconds", "Before first turns.", value=counts.seconds_waiting)
        yield CounterMetricFamily("freenergy_working_seconds", "Of the model thread.", value=counts.seconds_working)
        batches = counts.batches.copy()
        sums = [(str(most), float(sum(n for size, n in batches.items() if size <= most))) for most in _BATCHES]
        total = float(sum(batches.values()))
        yield HistogramMetricFamily(
            "freenergy_batch_contexts",
            "Contexts that shared a call of the models.",
            buckets=[*sums, ("+Inf", total)],
            sum_value=float(sum(size * n for size, n in batches.items())),
        )
