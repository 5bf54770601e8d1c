"""What a Prometheus server reads: requests as they are answered, and the server's own counts."""

from collections.abc import Iterable
from typing import final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freenergy.web.model_server import ModelServer

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@final
class Metrics:
    """Has its own registry, so that two servers in one process do not interfere."""

    def __init__(self, server: ModelServer) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfServer(server))
        self.requests = Counter(
            "freenergy_requests", "Requests that were answered.", ["route", "status"], registry=self.registry
        )

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)


@final
class Counting:
    """Middleware that counts answers by the route's pattern, never by the path: paths are without number."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.requests = app, metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the answer and pass it on."""
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

    def collect(self) -> Iterable[Family]:
        """All families."""
        counts = self.server.counts
        yield GaugeMetricFamily("freenergy_queue", "Jobs that wait or are worked on.", value=self.server.queue)
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
