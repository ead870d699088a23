"""Many clients at once: 1, 2, 4 and more processes sample, extend, or half of them each. Whose CPU does a call cost?"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from tdserve.base.config import TransportName
from tdserve.bench.child import Child, Pipe, open_children
from tdserve.bench.cpu_times import (
    CLIENT,
    Processes,
    count_cpu,
    name_cpu,
    read_cpu_s,
    read_mib,
    wait_for_processes,
)
from tdserve.bench.figures import Scale
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.measure import Pacing, Round, Task
from tdserve.bench.stage import Case, Stage
from tdserve.bench.workload_data import make_transitions
from tdserve.bench.workloads.occupancy import measure_occupancy
from tdserve.bench.workloads.replay_rounds import make_extends, make_samples
from tdserve.bench.workloads.replays import FILL_ROWS, open_filled
from tdserve.client.connecting import connect
from tdserve.launcher import Server

POOL_ROWS = 4_096
SAMPLE_ROWS = 256
EXTEND_ROWS = 64

STORE = "clients"

ROLES = {
    f"sample {SAMPLE_ROWS}": ("samples",),
    f"extend {EXTEND_ROWS}": ("extends",),
    "sample and extend": ("samples", "extends"),
}
"""The names of the figures, and what the clients do in turn."""

NUM_ROWS = {"samples": SAMPLE_ROWS, "extends": EXTEND_ROWS}
"""Rows of a call."""

LEAST_CPU_US = 10.0
"""A process that spends less on a call limits nothing: control has no part in most samples, over shm no worker has."""


def measure_many_clients(stage: Stage) -> Generator[Case]:
    """Measures calls per second, each client waiting for its own, and the CPU of all processes for a call.

    Over gloo, two bare processes exchange the same bytes first: a worker has the cost of the one that answers, too.
    """
    if stage.transport == "gloo":
        yield from _measure_bare(stage)
    pool = make_transitions(POOL_ROWS)
    with open_filled(stage, STORE, pool, stage.sizes.replay_rows):
        yield from _measure_client_counts(stage, stage.address, stage.servers)


def measure_cluster(stage: Stage) -> Generator[Case]:
    """Measures the same of a table that several servers share, of one server first, and what sessions and stores cost
    a server."""
    yield from measure_occupancy(stage)
    pool = make_transitions(POOL_ROWS)
    for num_shards in stage.options.shards:
        with (
            open_servers(stage, num_shards) as (address, servers),
            connect(address, transport=stage.transport) as client,
        ):
            table = client.create_replay(STORE, pool.rows[0], stage.sizes.replay_rows, shards="all")
            for number, batch in enumerate(islice(pool.iter_batches(FILL_ROWS), stage.sizes.replay_rows // FILL_ROWS)):
                table.extend(batch, writer=number + 1)
            yield from _measure_client_counts(stage, address, servers, f", {num_shards} shard{'s'[: num_shards - 1]}")


def _measure_bare(stage: Stage) -> Iterator[Case]:
    """Exchanges the bytes of a call; the CPU of the process that answers stands in the workers' place."""
    sizes = {
        f"bare gloo, {SAMPLE_ROWS} rows asked for": {"out": REQUEST_NBYTES, "back": SAMPLE_ROWS * find_row_nbytes()},
        f"bare gloo, {EXTEND_ROWS} rows acknowledged": {"out": EXTEND_ROWS * find_row_nbytes(), "back": REQUEST_NBYTES},
    }
    for name, moved in sizes.items():
        bare = count_cpu(stage.link.make_floor(**moved), {"workers": [stage.link.pid]})
        yield Case(name, Scale("calls/s"), bare)


@contextmanager
def open_servers(stage: Stage, num_servers: int) -> Iterator[tuple[str, Processes]]:
    """Starts servers; yields their address, and the ids of their processes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=stage.folder)))
        started = [stack.enter_context(Server(folder / f"root{number}")) for number in range(num_servers)]
        address = ",".join(server.address for server in started)
        yield address, wait_for_processes(started)


def _measure_client_counts(stage: Stage, address: str, servers: Processes, where: str = "") -> Generator[Case]:
    """Measures 1, 2, 4 and more clients of one server or of several.

    Args:
        where: What the names of the figures say about the servers.
    """
    fewest, most = stage.options.clients or (1, stage.sizes.num_clients)
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power >= fewest]
    pacing = Pacing(stage.sizes.clients_s / stage.options.num_rounds)
    with open_children(max(numbers), work_as_client, address, stage.transport, STORE) as children:
        for child in children:
            child.recv()  # until none of them starts any more
        for name, roles in ROLES.items():
            for num in (num for num in numbers if num >= len(roles)):
                clients = {child: roles[number % len(roles)] for number, child in enumerate(children[:num])}
                _ask_all(clients, clients.values())
                task = Task(partial(run_together, clients, servers))
                yield Case(f"{name}, {num} client{'s'[: num - 1]}{where}", Scale("calls/s"), task, pacing=pacing)
                _ask_all(clients, [None] * num)


def run_together(clients: Mapping[Child, str], servers: Processes, pacing: Pacing) -> Round:
    """Lets clients work at the same time. Their last samples are checked when the clock has stopped.

    Args:
        clients: They are connected; with each, what it does.
        servers: The ids of the server's processes, by the part that they play.
        pacing: How long.
    """
    processes = {**servers, CLIENT: [client.pid for client in clients]}
    before_s, started = read_cpu_s(processes), time.perf_counter()
    rounds: list[Round] = _ask_all(clients, [pacing] * len(clients))
    elapsed_s = time.perf_counter() - started
    cpu_s = {part: after_s - before_s[part] for part, after_s in read_cpu_s(processes).items()}
    for client in clients:
        client.recv()
    op_s = tuple(seconds for each in rounds for seconds in each.op_s)
    num_calls = dict.fromkeys(clients.values(), 0)
    for role, each in zip(clients.values(), rounds, strict=True):
        num_calls[role] += len(each.op_s)
    rates = {f"{role}/s": num / elapsed_s for role, num in num_calls.items()} if len(num_calls) > 1 else {}
    cpu_us = {part: spent_s * 1e6 / len(op_s) for part, spent_s in cpu_s.items()}
    available = {
        "control": len(servers["control"]),
        "workers": len(servers["workers"]),
        "cores": len(os.sched_getaffinity(0)),
    }
    nbytes = sum(num * NUM_ROWS[role] for role, num in num_calls.items()) * find_row_nbytes()
    moved = {"MB/s": nbytes / 1e6 / elapsed_s}
    return Round(op_s, elapsed_s, details={**rates, **moved, **describe_cpu(cpu_us, available), **read_mib(processes)})


@cache
def find_row_nbytes() -> int:
    """Returns the bytes of a row."""
    return make_transitions(2).row_nbytes


def describe_cpu(cpu_us: Mapping[str, float], available: Mapping[str, int]) -> dict[str, float]:
    """Returns the CPU that a call costs, and the rates that it allows. These are calculated.

    If the least of them is that of the workers, more workers would help; if that of the cores, more cores; if that of
    control, neither. If all are far above what was measured, the clients wait for something else than CPU.

    Args:
        cpu_us: Microseconds for a call, by the part that processes play.
        available: The number of processes that share the work of a part; as "cores", of those that can run at once.
    """
    spent_us = {**cpu_us, "cores": sum(cpu_us.values())}
    rates = {part: num * 1e6 / spent_us[part] for part, num in available.items() if spent_us[part] >= LEAST_CPU_US}
    return {
        **name_cpu(cpu_us),
        **{f"calculated: {part}": rate for part, rate in rates.items()},
    }


def _ask_all(clients: Iterable[Child], orders: Iterable[object]) -> list[Round]:
    """Sends each client its order, then waits for all answers."""
    for client, order in zip(clients, orders, strict=True):
        client.send(order)
    return [client.recv() for client in clients]


def work_as_client(pipe: Pipe, address: str, transport: TransportName, store: str) -> None:
    """Runs one client process: calls as ordered, then disconnects.

    Answers when it has started, then each order with the round, and again when the last sample was compared with what
    was written.
    """
    pool = make_transitions(POOL_ROWS)
    batches = pool.iter_batches(EXTEND_ROWS)
    pipe.send(None)
    while True:
        role = pipe.recv()
        with connect(address, transport=transport) as client:
            replay = client.replay(store)
            if role == "samples":
                task = make_samples(replay, SAMPLE_ROWS, 1, pool.check)
            else:
                task = make_extends(replay, batches, 1, lambda index, batch: None)
            pipe.send(None)
            while (pacing := pipe.recv()) is not None:
                done = task.run_round(pacing)
                pipe.send(replace(done, last=None))
                if task.check is not None:
                    task.check(done.last)
                pipe.send(None)
        pipe.send(None)
