"""Measures what one server takes, for the guide's page ``limits``: ``python -m tests.limits``.

It takes a minute or two, and needs some hundred megabytes of disk. Each line names what was done, and the figure.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import TDServeError
from tdserve.bench.cpu_times import wait_for_processes
from tdserve.store.durability.environment_scan import count_used_bytes

NUM_SESSIONS = 60
NUM_STORES = 2_000
NUM_TABLES = 200
NUM_ROWS = 4_000_000
NUM_VERSIONS = 500
NUM_ENTRIES = 20_000
NUM_SAMPLES = 200

ROW = TensorDict({"obs": torch.zeros(24), "action": torch.tensor(0), "reward": torch.tensor(0.0)}, [])


def main() -> None:
    """Prints one line for each figure."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tdserve-limits-"))
        server = stack.enter_context(tdserve.Server(Path(folder, "root"), port=0))
        client = stack.enter_context(server.client(transport="gloo"))
        for measure in MEASURES:
            for what, figure in measure(server, client):
                print(f"{measure.__name__.split('_')[1]:>10} | {what} | {figure}", flush=True)


Figures = Iterator[tuple[str, str]]


def measure_sessions(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Descriptors and memory of a session, at the server."""
    client.init_remote(TensorDict({"x": torch.zeros(1 << 18)}, []), "read")
    for transport in ("gloo", "grpc", "shm"):
        before, memory = count_descriptors(server, client), sum_memory(server, client)
        with ExitStack() as stack:
            for _ in range(NUM_SESSIONS):
                stack.enter_context(server.client(transport=transport)).load_memmap("read")  # opens its channel
            after, grown = count_descriptors(server, client), sum_memory(server, client) - memory
        for role in ("control", "worker"):
            yield (
                f"{transport}: descriptors of {role} for a session",
                f"{(after[role] - before[role]) / NUM_SESSIONS:.1f}",
            )
        yield f"{transport}: memory of control and worker for a session", f"{grown / NUM_SESSIONS / 1024:.0f} KiB"


def measure_stores(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Small tensordict stores, which the catalog holds."""
    td, size = TensorDict({"a": torch.zeros(8)}, []), size_catalog(server)
    begin_s = time.perf_counter()
    for number in range(NUM_STORES):
        client.init_remote(td, f"small-{number}")
    yield (
        f"creation of {NUM_STORES} stores of 32 B, one by one",
        f"{NUM_STORES / (time.perf_counter() - begin_s):.0f}/s",
    )
    yield "catalog for each", f"{max(size_catalog(server) - size, 0) / NUM_STORES:.0f} B"
    begin_s = time.perf_counter()
    names_found = client.stores("small-")
    yield f"list of {len(names_found)} names", f"{1e3 * (time.perf_counter() - begin_s):.1f} ms"
    for name in names_found:
        client.delete(name)


def measure_tables(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Tables, which have files."""
    begin_s = time.perf_counter()
    for number in range(NUM_TABLES):
        client.create_replay(f"table-{number}", ROW, 100).extend(ROW.expand(10).clone())
    yield (
        f"creation of {NUM_TABLES} tables and their first rows",
        f"{NUM_TABLES / (time.perf_counter() - begin_s):.0f}/s",
    )
    files = sum(len(names) for _, _, names in os.walk(Path(server.config.root, "stores/table-0")))
    yield "files of each, with 3 leaves", f"{files}"
    for number in range(NUM_TABLES):
        client.delete(f"table-{number}")


def measure_rows(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """One long table."""
    row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
    for name, sampler in (("uniform", tdserve.Uniform()), ("prioritized", tdserve.Prioritized())):
        memory, begin_s = sum_memory(server, client, roles=("control",)), time.perf_counter()
        table = client.create_replay(name, row, NUM_ROWS, sampler=sampler)
        took_s = time.perf_counter() - begin_s
        content = TensorDict({"x": torch.zeros(NUM_ROWS // 8, dtype=torch.uint8)}, [NUM_ROWS // 8])
        for _ in range(8):
            table.extend(content)
        grown = sum_memory(server, client, roles=("control",)) - memory
        nbytes = sum(
            path.stat().st_size for path in Path(server.config.root, "stores", name).rglob("*") if path.is_file()
        )
        yield f"{name} table of {NUM_ROWS:,} rows of one byte: created in", f"{took_s:.1f} s"
        yield "files for each row, beside its content", f"{nbytes / NUM_ROWS - 1:.1f} B"
        yield "memory of control for each row", f"{grown / NUM_ROWS:.1f} B"
        client.delete(name)
    yield from find_limit("capacity of a table", lambda n: client.create_replay("t", row, n), [2**44])


def measure_versions(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Many kept versions of small weights."""
    state, begin_s = TensorDict({"w": torch.zeros(256)}, []), time.perf_counter()
    for _ in range(NUM_VERSIONS):
        client.publish("weights", state, keep=NUM_VERSIONS)
    yield f"{NUM_VERSIONS} versions of 1 KiB, all kept", f"{NUM_VERSIONS / (time.perf_counter() - begin_s):.0f}/s"
    folder = Path(server.config.root, "stores/weights/versions")
    yield (
        "disk for each",
        f"{sum(path.stat().st_blocks * 512 for path in folder.iterdir()) / NUM_VERSIONS / 1024:.0f} KiB",
    )
    yield from find_limit("metadata of a version", lambda n: client.publish("weights", state, metadata={"a": "x" * n}))
    client.delete("weights")


def measure_entries(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Entries of a keyed store."""
    store, begin_s = client.create_kv("kv"), time.perf_counter()
    for first in range(0, NUM_ENTRIES, 1000):
        store.put([f"{first + number:012d}" for number in range(1000)], torch.zeros(1000, 8))
    yield f"{NUM_ENTRIES:,} entries, 1,000 a call", f"{NUM_ENTRIES / (time.perf_counter() - begin_s):,.0f}/s"
    used = Path(server.config.root, "stores/kv/objects/data.mdb").stat().st_blocks * 512
    yield "disk for each entry of 32 B", f"{used / NUM_ENTRIES:.0f} B"
    yield from find_limit("length of a key", lambda n: store.put("k" * n, torch.zeros(1)))
    yield from find_limit(
        "keys of a call", lambda n: store.put([str(k) for k in range(n)], torch.zeros(n, 1)), [8192, 16_384, 16_385]
    )
    client.delete("kv")


def find_name_limits(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Names of stores and keys."""
    td = TensorDict({"a": torch.zeros(1)}, [])

    def make(length: int) -> None:
        client.init_remote(td, "n" * length)
        client.delete("n" * length)

    yield from find_limit("length of a store's name", make)

    def make_key(length: int) -> None:
        client.init_remote(TensorDict({"k" * length: torch.zeros(1)}, []), "keys")
        client.delete("keys")

    yield from find_limit("length of a tensordict's key", make_key, [1000, 10_000, 100_000])


def measure_structures(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """Depth and number of leaves of a structure."""

    def nest(depth: int) -> None:
        td = TensorDict({"x": torch.zeros(1)}, [])
        for _ in range(depth - 1):
            td = TensorDict({"n": td}, [])
        client.init_remote(td, "nested")
        client.delete("nested")

    yield from find_limit("depth of a tensordict", nest)

    def widen(num_leaves: int) -> None:
        client.init_remote(TensorDict({str(number): torch.zeros(1) for number in range(num_leaves)}, []), "wide")
        client.delete("wide")

    for num_leaves in (1_000, 10_000):
        begin_s = time.perf_counter()
        widen(num_leaves)
        yield f"a store of {num_leaves:,} leaves, created and deleted", f"{time.perf_counter() - begin_s:.1f} s"


def measure_checksums(server: tdserve.Server, client: tdserve.Client) -> Figures:
    """What ``checksum=True`` costs readers and writers."""
    rows_ = ROW.expand(256).clone()
    for transport in ("gloo", "shm"):
        with server.client(transport=transport) as other:
            made: dict[str, Any] = {}
            for name, checksum in (("without", False), ("with", True)):
                table = made[name] = other.create_replay(name, ROW, 4096, checksum=checksum, durability="disk")
                for _ in range(16):
                    table.extend(rows_)  # synced before it is answered, so that all rows have a checksum
            times: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(NUM_SAMPLES):
                for name, table in made.items():
                    begin_s = time.perf_counter()
                    table.sample(256)
                    times[name].append(time.perf_counter() - begin_s)
            without, with_ = (sorted(each)[len(each) // 2] * 1e6 for each in times.values())
            yield f"{transport}: sample of 256 rows of 108 B, without and with", f"{without:.0f} and {with_:.0f} us"
            for name in made:
                other.delete(name)


def find_limit(what: str, call: Callable[[int], Any], sizes: Sequence[int] = ()) -> Figures:
    """Yields the largest size that works, by halving or of those given, and the error beyond it."""
    low = 0
    for high in sizes or [1 << bit for bit in range(2, 23)]:
        failure = describe_failure(call, high)
        if not failure:
            low = high
            continue
        while not sizes and high - low > 1:
            middle = (low + high) // 2
            found = describe_failure(call, middle)
            low, high, failure = (low, middle, found) if found else (middle, high, failure)
        yield what, f"{low:,}; beyond: {failure}"
        return
    yield what, f"{low:,} at least"


def describe_failure(call: Callable[[int], Any], size: int) -> str:
    """Returns the error of a call; "" if there is none."""
    try:
        call(size)
    except (TDServeError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return ""


def find_pids(server: tdserve.Server, client: tdserve.Client) -> dict[str, list[int]]:
    """Returns the process ids of the server by role."""
    found = wait_for_processes([server])
    return {"control": [*found["control"]], "worker": [*found["workers"]]}


def count_descriptors(server: tdserve.Server, client: tdserve.Client) -> dict[str, int]:
    """Returns the open descriptors of each role."""
    return {
        role: sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        for role, pids in find_pids(server, client).items()
    }


def sum_memory(
    server: tdserve.Server, client: tdserve.Client, *, roles: tuple[str, ...] = ("control", "worker")
) -> int:
    """Returns the private memory of some roles, in bytes: what files they have mapped does not count."""
    total = 0
    for role, pids in find_pids(server, client).items():
        for pid in pids if role in roles else ():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return total


def size_catalog(server: tdserve.Server) -> int:
    """Returns the bytes of the catalog up to its last page in use."""
    return count_used_bytes(Path(server.config.root, "catalog"))


MEASURES = (
    measure_sessions,
    measure_stores,
    measure_tables,
    measure_rows,
    measure_versions,
    measure_entries,
    find_name_limits,
    measure_structures,
    measure_checksums,
)


if __name__ == "__main__":
    main()
