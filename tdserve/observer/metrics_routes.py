"""``/metrics`` for Prometheus, and ``/health`` for what watches the server."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from tdserve.observer.access import HEALTH, get_viewer
from tdserve.observer.exposition import FigureCollector
from tdserve.observer.snapshots import ServerSnapshot


def make_metrics_routes() -> list[BaseRoute]:
    """Returns the routes."""

    async def show_metrics(request: Request) -> Response:
        """Returns the metrics, as text or in the format of OpenMetrics, as the caller accepts. Also if the server does
        not answer: then there are few."""
        snapshot = await get_viewer(request).snapshots.get()
        content, media_type = await asyncio.to_thread(encode, snapshot, request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    async def show_health(request: Request) -> Response:
        """Returns 200 if the server answers, else 503; needs no token, and has no other content."""
        if (await get_viewer(request).snapshots.get()).figures is None:
            return PlainTextResponse("the server does not answer\n", 503)
        return PlainTextResponse("ok\n")

    return [Route("/metrics", show_metrics), Route(HEALTH, show_health)]


def encode(snapshot: ServerSnapshot, accept: str) -> tuple[bytes, str]:
    """Returns the metrics of a snapshot in the format that a caller accepts, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FigureCollector(snapshot))
    encoder, media_type = choose_encoder(accept)
    return encoder(registry), media_type
