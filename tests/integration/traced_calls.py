"""A program whose calls are traced.

``python -m tests.integration.traced_calls SCENARIO ADDRESS TRANSPORT STORE RECEIVER`` sets a tracer provider up as an
application does, makes the calls of one scenario below a span of its own, and prints the id of that span's trace.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tensordict import TensorDict

import tdserve
from tests.processes import START_TIMEOUT_S, ready_worker, wait_for

ROW = TensorDict({"x": torch.zeros(1024)}, [])
"""4 KiB: 16 rows are too large for a message."""

TIMEOUT_S = START_TIMEOUT_S


def make_table(client: Any, name: str, **options: Any) -> Any:
    """Makes a table of 16 rows."""
    table = client.create_replay(name, like=ROW, capacity=1024, **options)
    table.extend(ROW.expand(16))
    return table


@contextmanager
def begin_trace(name: str) -> Iterator[None]:
    """Runs a block below a span of the application, and prints the id of its trace."""
    with trace.get_tracer("application").start_as_current_span(name) as span:
        sys.stdout.write(f"{span.get_span_context().trace_id:032x}\n")
        sys.stdout.flush()
        yield


def sample(client: Any, name: str) -> None:
    """Draws rows with priorities, which control decides about."""
    table = make_table(client, name, sampler=tdserve.Prioritized(alpha=0.6, beta=0.4))
    with begin_trace("sample"):
        table.sample(16)


def draw(client: Any, name: str) -> None:
    """Draws rows without asking control, once the mail is open; the last trace is such a draw."""
    table = make_table(client, name)
    for _ in range(20):
        with begin_trace("draw"):
            table.sample(1)


def claim(client: tdserve.Client, name: str) -> None:
    """Writes rows until control is not asked any more; the last trace is such an extend."""
    table = make_table(client, name)
    for _ in range(200):
        with begin_trace("claim"):
            table.extend(ROW.expand(1))


def extend(client: Any, name: str) -> None:
    """Writes rows whose answer nobody waits for at once."""
    table = make_table(client, name, sampler=tdserve.Prioritized(alpha=0.6, beta=0.4))
    with begin_trace("extend"):
        future = table.extend(ROW.expand(16), return_early=True)
    future.result(TIMEOUT_S)


def read_missing(client: Any, name: str) -> None:
    """Reads a store that does not exist."""
    make_table(client, f"{name}-other")
    with begin_trace("missing"), suppress(tdserve.StoreNotFoundError):
        client.latest(name, timeout_s=0)


def retry(client: tdserve.Client, name: str) -> None:
    """Draws rows that come after the data worker has died once."""
    table = make_table(client, name, sampler=tdserve.Prioritized(alpha=0.6, beta=0.4), min_size=17)

    def draw_rows() -> None:
        with begin_trace("retry"):
            table.sample(16, timeout_s=TIMEOUT_S)

    def is_waiting() -> bool:
        return client.describe(name).num_waiting > 0

    with ThreadPoolExecutor(1) as threads:
        drawn = threads.submit(draw_rows)
        wait_for(is_waiting, "the wait of a sample")
        pid = ready_worker(client)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: ready_worker(client)["pid"] != pid and is_waiting(), "its retry", timeout_s=TIMEOUT_S)
        table.extend(ROW.expand(16))
        drawn.result(TIMEOUT_S)


def await_sample(client: tdserve.Client, name: str) -> None:
    """Draws rows from a coroutine."""
    make_table(client, name, sampler=tdserve.Prioritized(alpha=0.6, beta=0.4))

    async def draw_rows() -> None:
        async with tdserve.aio.connect(client.address, transport=client.transport) as asked:
            table = await asked.replay(name)
            with begin_trace("await"):
                await table.sample(16)

    asyncio.run(draw_rows())


def sample_shards(client: Any, name: str) -> None:
    """Draws rows of two servers."""
    table = client.create_replay(name, like=ROW, capacity=1024, shards=2)
    for _ in range(8):
        table.extend(ROW.expand(16))
    with begin_trace("shards"):
        table.sample(64)


SCENARIOS: dict[str, Callable[[Any, str], None]] = {
    made.__name__: made for made in (sample, draw, claim, extend, read_missing, retry, await_sample, sample_shards)
}


def main(scenario: str, address: str, transport: Any, store: str, receiver: str) -> None:
    """Makes the calls."""
    provider = TracerProvider(resource=Resource.create({"service.name": "application"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{receiver}/v1/traces")))
    trace.set_tracer_provider(provider)
    with tdserve.connect(address, transport=transport, timeout_s=TIMEOUT_S) as client:
        SCENARIOS[scenario](client, store)
    provider.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
