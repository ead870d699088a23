"""Answers of a server for the tests of this folder, and calls of the application without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.types import Message

from tdserve.base.call_times import NUM_BUCKETS
from tdserve.base.errors import ConnectError, UnauthenticatedError
from tdserve.client.session.catalog.description import StoreDescription, from_message
from tdserve.observer.app import make_app
from tdserve.observer.snapshots import Snapshots
from tdserve.observer.viewers import Viewer, Viewers
from tdserve.v1 import control_pb2


class RecordedServer:
    """Stands for a server: it gives prepared answers, and counts the questions."""

    def __init__(self, figures: control_pb2.ObserveResponse | None = None, names: tuple[str, ...] = ()) -> None:
        self.figures = figures
        self.names = list(names)
        self.num_questions = 0

    def observe(self, **asked: Any) -> control_pb2.ObserveResponse:
        self.num_questions += 1
        if self.figures is None:
            raise ConnectError(address="here", reason="it is gone")
        return self.figures

    def stores(self, prefix: str = "") -> list[str]:
        return self.names

    def find(self, name: str, *, timeout_s: float | None = None) -> StoreDescription | None:
        if self.figures is None:
            raise ConnectError(address="here", reason="it is gone")
        described = [store.description for store in self.figures.stores if store.description.name == name]
        return from_message(described[0]) if described else None


class Answer(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def make_application(
    server: RecordedServer | None = None, *, token: str | None = None, hosts: tuple[str, ...] = ()
) -> Starlette:
    """Returns the application of a server that answers."""
    own = Viewer(Snapshots(server or RecordedServer(make_figures())))

    def check_token(given: str) -> None:
        if given != token:
            raise UnauthenticatedError(address="here")

    viewers = Viewers(
        own, asks_token=token is not None, open_viewer=lambda _: own, check_token=check_token, known=token
    )
    return make_app(viewers, hosts=hosts)


def call(app: Starlette, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Calls an application as an ASGI server does."""
    path, _, query = path.partition("?")
    named = {"host": "127.0.0.1:9", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9),
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def make_figures(num_stores: int = 0) -> control_pb2.ObserveResponse:
    """Returns the figures of a server that has a bit of everything, and so many tables."""
    figures = control_pb2.ObserveResponse(time_s=1_000.0, uptime_s=60.0, server_id="a" * 32, version="1.2.3")
    figures.start_time_s = 940.0
    figures.root_free_bytes, figures.root_size_bytes = 10, 100
    figures.num_unsynced_stores, figures.sync_age_s = 1, 3.0
    figures.checkpoint, figures.checkpoint_age_s, figures.checkpoint_interval_s = "a-checkpoint", 5.0, 600.0
    figures.sessions_by_transport["shm"] = 2
    figures.kinds.add(kind=control_pb2.STORE_KIND_REPLAY, num_stores=num_stores)
    figures.workers.add(worker=0, pid=12, num_restarts=3, is_ready=True)
    figures.transports.add(transport="gloo", bytes_in=5, bytes_out=6, transfers_in=1, transfers_out=2)
    figures.processes.add(process="control", pid=11, resident_bytes=1 << 20, cpu_s=1.5, num_descriptors=9)
    calls = figures.calls.add(side="control", call="sample", buckets=[0] * NUM_BUCKETS, sum_s=0.5)
    calls.buckets[2], calls.buckets[NUM_BUCKETS - 1] = 7, 1
    calls.errors.add(code="DEADLINE_EXCEEDED", num_calls=1)
    for number in range(num_stores):
        add_table(figures, f"table-{number:05}")
    return figures


def add_table(figures: control_pb2.ObserveResponse, name: str) -> control_pb2.StoreFigures:
    """Adds a table to figures; returns it."""
    store = figures.stores.add(is_open=True)
    store.description.name, store.description.kind = name, control_pb2.STORE_KIND_REPLAY
    store.description.num_rows, store.description.capacity, store.description.nbytes = 8, 16, 4096
    store.description.inserts, store.description.samples = 10, 40
    store.sample_age.mean_s, store.sample_age.max_s = 2.5, 30.0
    store.sample_age.mean_rows, store.sample_age.max_rows = 1_500.0, 4_000
    store.sample_age.mean_lag, store.sample_age.max_lag = 1.5, 3
    store.waits.add(call="sample", num_waits=2, sum_s=0.25, num_waiting=1, longest_s=3.0)
    return store


def add_weights(figures: control_pb2.ObserveResponse, name: str) -> control_pb2.StoreFigures:
    """Adds weights with a reader to figures; returns them."""
    store = figures.stores.add(is_open=True, newest_age_s=2.0, num_versions=2, num_readers=1)
    store.description.name, store.description.kind = name, control_pb2.STORE_KIND_WEIGHTS
    store.description.version = 9
    store.readers.add(session=5, host="here", pid=77, version=7, lag=2, age_s=4.0)
    return store
