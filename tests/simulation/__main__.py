"""``python -m tests.simulation --schedules 100000 --seed 1``: random schedules of clients, crashes and faults against a
real control process in virtual time.

Each run of 20 schedules has a seed of its own, which is printed if one fails; ``--only SEED`` repeats that run. Each
run is a fork of one process whose addresses are not random: what follows from a seed does not depend on runs before.
The last line has a number that stands for all that has happened in the first run, by which its repetition is compared.
``--processes N`` has N runs at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import pickle
import resource
import shutil
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulation import virtual_time

SCHEDULES_PER_RUN = 20

_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
_ADDR_NO_RANDOMIZE = 0x0040000

Result = tuple[int, str, dict[str, Counter[str]]]
"""The seed of a run, its failure or "", and what happened."""


def run_seed(seed: int) -> Result:
    """Runs the schedules of a seed."""
    from tests.simulation.schedule import run_root

    place = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp", f"tdserve-simulation-{os.getuid()}-{seed}")
    with _lock(f"{place}.lock"):  # paths follow from the seed, too: another run of it goes first
        shutil.rmtree(place, ignore_errors=True)
        try:
            return seed, "", run_root(place, seed, SCHEDULES_PER_RUN)
        except Exception:  # noqa: BLE001 (it is reported)
            return seed, traceback.format_exc(), {}


@contextmanager
def _lock(path: str) -> Iterator[None]:
    """Waits until no other process holds the lock, and holds it. Its file goes with the last one."""
    while True:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # the one before has removed it
            try:
                yield
            finally:
                os.unlink(path)
            return


def _prepare(*, shows_log: bool) -> None:
    """Imports all that runs need, with the clocks of the simulation."""
    virtual_time.install()
    importlib.import_module("tests.simulation.schedule")
    logging.disable(logging.CRITICAL)
    run_seed(0)  # what the interpreter learns of the code, and what is made once, need not be made in each fork
    logging.disable(logging.NOTSET if shows_log else logging.CRITICAL)
    gc.collect()
    gc.freeze()  # each start of a server collects


def _fork(seed: int) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_fd)
        with open(write_fd, "wb") as file:
            pickle.dump(run_seed(seed), file)
        sys.stderr.flush()
        os._exit(0)
    os.close(write_fd)
    return pid, read_fd


def run_all(seeds: list[int], num_processes: int) -> Iterator[Result]:
    """Yields the results of runs, in the order of their seeds."""
    begun: list[tuple[int, int, int]] = []
    left = list(seeds)
    while left or begun:
        while left and len(begun) < num_processes:
            seed = left.pop(0)
            begun.append((seed, *_fork(seed)))
        seed, pid, fd = begun.pop(0)
        with open(fd, "rb") as file:
            content = file.read()
        os.waitpid(pid, 0)
        yield pickle.loads(content) if content else (seed, "its process died", {})


def main() -> int:
    """Runs the simulation; returns 1 if a schedule has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="runs the schedules of this seed alone")
    parser.add_argument("--log", action="store_true", help="shows the server's log")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)  # of what is executed from here on
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, **_ENVIRONMENT}
        )
    first = arguments.seed * 1_000_000
    seeds = (
        [arguments.only] if arguments.only is not None else list(range(first, first + -(-arguments.schedules // 20)))
    )
    _prepare(shows_log=arguments.log)
    totals: dict[str, Counter[str]] = {}
    num_failed = 0
    first_run = 0
    for seed, failure, counts in run_all(seeds, arguments.processes):
        if seed == seeds[0]:
            first_run = zlib.crc32(repr(counts).encode())
        if failure:
            num_failed += 1
            print(f"seed {seed} failed; repeat it by --only {seed}\n{failure}", flush=True)
        for name, count in counts.items():
            totals.setdefault(name, Counter()).update(count)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = usage.ru_utime + usage.ru_stime
    num_schedules = len(seeds) * SCHEDULES_PER_RUN
    print(f"{num_schedules} schedules in {took_s:.1f} s of CPU, {num_failed} of {len(seeds)} runs failed")
    for name, count in totals.items():
        parts = ", ".join(f"{key} {number:,}" for key, number in sorted(count.items()))
        print(f"{name}: {sum(count.values()):,} ({parts})")
    print(f"first run: {first_run:08x}")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
