"""What one more session, tensordict or table costs a server: to make, and as long as it is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench.cpu_times import CLIENT, Processes, name_cpu, read_cpu_s, read_mib, wait_for_processes
from tdserve.bench.figures import Scale
from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.bench.occupancy_model import ONE_MORE
from tdserve.bench.stage import Case, Stage
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.launcher import Server
from tdserve.store.durability.environment_scan import count_used_bytes

ROW = TensorDict({"obs": torch.zeros(24), "action": torch.tensor(0), "reward": torch.tensor(0.0)}, [])
CAPACITY, NUM_ROWS = 1_000, 64

NUM_INTERVALS = 5
"""Parts of the time without any request."""

READ = "read"
"""A store whose content takes the channel of a session."""


def measure_occupancy(stage: Stage) -> Generator[Case]:
    """Measures what each adds to CPU, memory, descriptors and catalog of a server; all of them stay until the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(dir=stage.folder))
        server = stack.enter_context(Server(Path(folder, "root")))
        client = stack.enter_context(connect(server.address, transport=stage.transport))
        servers = wait_for_processes([server])
        client.init_remote(TensorDict({"x": torch.zeros(1 << 18)}, []), READ)

        def open_session() -> None:
            opened = stack.enter_context(connect(server.address, transport=stage.transport))
            opened.from_remote_init(READ)

        makers: dict[str, tuple[int, Callable[[], object]]] = {
            "session": (stage.sizes.num_more // 3, open_session),
            "tensordict": (stage.sizes.num_more, _make_tensordicts(client)),
            "table": (stage.sizes.num_more, _make_tables(client)),
        }
        for kind, (num_more, make) in makers.items():
            run = _Making(make, num_more, stage.sizes.idle_s, servers, Path(folder, "root", "catalog"))
            yield Case(f"{ONE_MORE}{kind}", Scale("us"), Task(run))


def _make_tensordicts(client: Client) -> Callable[[], None]:
    numbers, td = count(), TensorDict({"x": torch.zeros(8)}, [])
    return lambda: client.init_remote(td, f"tensordict-{next(numbers)}")


def _make_tables(client: Client) -> Callable[[], None]:
    """Returns what makes a table that is in use: with rows, which were sampled."""
    numbers, rows = count(), ROW.expand(NUM_ROWS).clone()

    def make() -> None:
        table = client.create_replay(f"table-{next(numbers)}", ROW, CAPACITY)
        table.extend(rows)
        if len(table.sample(NUM_ROWS)) != NUM_ROWS:
            raise CorruptDataError(path=table.name, expected=f"{NUM_ROWS} rows", actual="others")

    return make


class _Making:
    """A round: makes some, waits while nothing is done, and compares what the server has with what it had.

    Args:
        make: Makes one.
        num_more: How many a round makes.
        idle_s: Seconds without calls, in which the CPU of those that are there is measured.
        servers: The server's processes.
        catalog: Folder of the server's catalog.
    """

    def __init__(
        self, make: Callable[[], object], num_more: int, idle_s: float, servers: Processes, catalog: Path
    ) -> None:
        self._make, self._num_more, self._idle_s = make, max(num_more, 1), idle_s
        self._servers, self._catalog = servers, catalog
        self._num_made = 0
        self._idle_before = 0.0

    def __call__(self, pacing: Pacing) -> Round:
        if not self._num_made:
            self._idle_before = self._measure_idle()
        processes = {**self._servers, CLIENT: [os.getpid()]}
        before, before_s = self._measure_servers(), read_cpu_s(processes)
        made = time_round(self._make, Pacing(0.0, min_ops=self._num_more, max_ops=self._num_more))
        cpu_us = {
            part: 1e6 * (now_s - before_s[part]) / self._num_more for part, now_s in read_cpu_s(processes).items()
        }
        self._num_made += self._num_more
        idle = max(self._measure_idle() - self._idle_before, 0.0) / self._num_made
        grown = {name: (now - before[name]) / self._num_more for name, now in self._measure_servers().items()}
        return Round(made.op_s, made.elapsed_s, details={**name_cpu(cpu_us), **grown, "idle CPU": idle})

    def _measure_servers(self) -> Mapping[str, float]:
        """Returns KiB, descriptors and bytes of the catalog, by name."""
        memory = {name.replace("MiB", "KiB"): 1024 * mib for name, mib in read_mib(self._servers).items()}
        descriptors = {
            f"{part} fds": float(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids))
            for part, pids in self._servers.items()
        }
        return {**memory, **descriptors, "catalog B": float(count_used_bytes(self._catalog))}

    def _measure_idle(self) -> float:
        """Returns the microseconds of CPU that the server takes in a second without any request: in the
        calmest interval, since for a while it writes to the disk what was made."""
        pause_s, spent_s = self._idle_s / NUM_INTERVALS, []
        for _ in range(NUM_INTERVALS):
            before_s = sum(read_cpu_s(self._servers).values())
            time.sleep(pause_s)
            spent_s.append(sum(read_cpu_s(self._servers).values()) - before_s)
        return 1e6 * min(spent_s) / pause_s
