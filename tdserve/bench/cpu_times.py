"""The CPU and the memory that processes take, and what a call costs of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tdserve.base.deadline import Deadline
from tdserve.bench.measure import Pacing, Round, Task
from tdserve.launcher import Server

CLIENT = "client"
"""The part that this process, or those that it has started for the purpose, play."""

Processes = Mapping[str, Sequence[int]]
"""Ids of processes, by the part that they play."""


WORKERS_TIMEOUT_S = 120.0
"""Time for data workers to start: they import torch."""


def wait_for_processes(servers: Sequence[Server]) -> Processes:
    """Returns the ids of the processes of servers, once all of them run.

    Raises:
        DeadlineExceededError: A data worker has not started in time.
    """
    deadline, workers = Deadline.after(WORKERS_TIMEOUT_S), []
    for server in servers:
        with server.client() as client:
            while True:
                found = client.stats()["workers"]
                if all(worker["is_ready"] for worker in found):
                    break
                deadline.raise_if_expired("the start of the data workers")
                time.sleep(0.05)
        workers += [worker["pid"] for worker in found]
    return {"control": [server.pid for server in servers], "workers": workers}


def read_cpu_s(processes: Processes) -> dict[str, float]:
    """Returns the seconds of CPU that processes have had, by part.

    Each process has a clock of that, whose number the kernel derives from the process id. /proc has only hundredths.
    """
    return {part: sum(time.clock_gettime(~pid << 3 | 2) for pid in pids) for part, pids in processes.items()}


def read_mib(processes: Processes) -> dict[str, float]:
    """Returns, as details of a round, the memory of processes without the files that they have mapped, by part."""
    return {f"{part} MiB": sum(map(_read_anonymous_mib, pids)) for part, pids in processes.items()}


def _read_anonymous_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) / 1024
    return 0.0


def name_cpu(cpu_us: Mapping[str, float]) -> dict[str, float]:
    """Returns the details of a round that show the microseconds of CPU for a call, by part."""
    return {f"{part} CPU": spent_us for part, spent_us in cpu_us.items()}


def count_cpu(task: Task, servers: Processes) -> Task:
    """Returns the same task, whose rounds show the CPU of the server's processes and of this one for an operation.

    A round that shows that itself, since it has other processes work, stays as it is.
    """
    processes = {**servers, CLIENT: [os.getpid()]}

    def run_round(pacing: Pacing) -> Round:
        before_s = read_cpu_s(processes)
        done = task.run_round(pacing)
        spent_us = {part: (s - before_s[part]) * 1e6 / len(done.op_s) for part, s in read_cpu_s(processes).items()}
        details = name_cpu(spent_us)
        return done if details.keys() & done.details.keys() else replace(done, details={**done.details, **details})

    return Task(run_round, task.check)
