"""Starts the job, or is the part of it that ``torchrun`` has started."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

import tdserve
from tdserve.base.config import TorchrunRank
from tdserve.base.errors import InvalidRequestError, PeerLostError, TDServeError
from tdserve.base.machine import get_own_command
from tdserve.examples.collectors.collector import collect_all
from tdserve.examples.collectors.learner import lead
from tdserve.examples.demo.processes import Processes

NUM_COLLECTORS = 4
KEY = "tdserve.examples.collectors"
"""Under which the ranks of a job find the server."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tdserve.examples.collectors")
    parser.add_argument("--collectors", type=int, metavar="N", help=f"processes; {NUM_COLLECTORS} by default")
    parser.add_argument("--address", metavar="HOST:PORT", help="a server; by default one is started")
    parser.add_argument("--versions", type=int, default=40, metavar="N", help="policies until the end")
    parser.add_argument("--max-seconds", type=float, default=60.0, metavar="S", help="ends it before")
    options = parser.parse_args(arguments)
    for name in ("collectors", "versions"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidRequestError(argument=name, reason=f"{value} is not at least 1")
    return options


def run_all(options: argparse.Namespace) -> None:
    """Is the learner, and starts the collectors as processes of its own."""
    num_collectors = options.collectors or NUM_COLLECTORS
    run = f"collectors-{uuid.uuid4().hex[:8]}"
    with server(options.address) as address, tempfile.TemporaryDirectory(prefix="tdserve-collectors-") as logs:
        collectors = Processes(Path(logs))

        def start() -> None:
            for index in range(num_collectors):
                arguments = [f"--address={address}", f"--run={run}", f"--index={index}"]
                collectors.start(f"collector {index}", "tdserve.examples.collectors.collector", arguments)

        def check() -> None:
            death = collectors.death()
            if death is not None and death.exit_code:
                raise PeerLostError(peer=death.name, reason=f"{death}\n{death.last_lines}")

        try:
            _lead(options, address, run, num_collectors=num_collectors, start=start, check=check)
        except TDServeError:
            check()  # a dead collector is the cause, what it was waited for in vain the effect
            raise
        finally:
            collectors.close()


def run_rank(options: argparse.Namespace, rank: TorchrunRank) -> None:
    """Is one process of a job that ``torchrun`` started: rank 0 is the learner, the others collect.

    Nothing here makes a process group: the ranks find the server through the key-value store that torchrun keeps for
    every job. A learner of several ranks would call ``init_process_group`` as ever.

    Raises:
        InvalidRequestError: There is no collector; or the job has several machines, and no server that all can reach.
    """
    if options.collectors is not None or rank.world_size < 2:
        reason = f"of {rank.world_size} processes one learns and the others collect"
        raise InvalidRequestError(argument="collectors", reason=reason)
    if options.address is None and rank.local_world_size < rank.world_size:
        reason = "is needed where a job has several machines: start a server that all of them reach"
        raise InvalidRequestError(argument="address", reason=reason)
    store = _store_of(rank)
    if rank.rank:
        address, run = store.get(KEY).decode().split()
        collect_all(address, run, index=rank.rank - 1, local_index=rank.local_rank)
        return
    with server(options.address) as address:
        run = f"collectors-{uuid.uuid4().hex[:8]}"
        store.set(KEY, f"{address} {run}")
        _lead(options, address, run, num_collectors=rank.world_size - 1)


def _store_of(rank: TorchrunRank) -> dist.Store:  # type: ignore[name-defined]
    """Of this attempt: a job that is started again gets a server of its own."""
    job = dist.TCPStore(rank.master_addr, rank.master_port, is_master=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"{KEY}/{rank.restart_count}", job)  # type: ignore[attr-defined]


@contextmanager
def server(address: str | None) -> Iterator[str]:
    """The address of a server: the given one, or of one that lives as long as the block."""
    if address is not None:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="tdserve-collectors-") as folder, tdserve.Server(folder) as started:
        yield started.address


def end_on_signals() -> None:
    """The first SIGINT or SIGTERM unwinds the stack, so that every ``with`` closes what it opened; later ones do not
    tear that apart."""

    def end(number: int, _: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it. Returns the exit code; no process, socket or temporary file is left."""
    end_on_signals()
    try:
        options, rank = parse(arguments), TorchrunRank.from_env()
        if rank is None:
            run_all(options)
        else:
            run_rank(options, rank)
    except TDServeError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


def _lead(options: argparse.Namespace, address: str, run: str, **arguments: object) -> None:
    print(f"server {address}; look inside: {get_own_command()} ls --address {address}", flush=True)
    lead(address, run, num_versions=options.versions, max_seconds=options.max_seconds, **arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
