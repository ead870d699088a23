"""Starts the job, or is the part of it that ``torchrun`` has started."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import tdserve
from tdserve.base.errors import InvalidRequestError, PeerLostError, TDServeError
from tdserve.base.machine import get_own_command
from tdserve.base.torchrun_rank import TorchrunRank
from tdserve.examples.collectors.collector import collect_all
from tdserve.examples.collectors.training import lead
from tdserve.examples.demo.processes import Processes

NUM_COLLECTORS = 4
SERVER_TIMEOUT_S = 20.0
"""For calls that wait for no other client: the server answers at once, or is gone."""

KEY = "tdserve.examples.collectors"
"""Key under which the ranks of a job find the server."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tdserve.examples.collectors")
    parser.add_argument("--collectors", type=int, metavar="N", help=f"processes; {NUM_COLLECTORS} by default")
    parser.add_argument("--address", metavar="HOST:PORT", help="a server; by default one is started")
    parser.add_argument("--versions", type=int, default=40, metavar="N", help="policies until the end")
    parser.add_argument("--max-seconds", type=float, default=60.0, metavar="S", help="ends it before")
    parser.set_defaults(run=f"collectors-{uuid.uuid4().hex[:8]}")  # a name that is new on any server
    options = parser.parse_args(arguments)
    for name in ("collectors", "versions"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidRequestError(argument=name, reason=f"{value} is not at least 1")
    return options


def run_all(options: argparse.Namespace) -> None:
    """Runs the learner, and starts the collectors as processes of its own."""
    with (
        provide_server(options.address) as address,
        tempfile.TemporaryDirectory(prefix="tdserve-collectors-") as logs,
        closing(Processes(Path(logs))) as collectors,
        tdserve.connect(address, timeout_s=SERVER_TIMEOUT_S) as client,
    ):
        for index in range(options.collectors or NUM_COLLECTORS):
            arguments = [address, options.run, str(index)]
            collectors.start(f"collector {index}", "tdserve.examples.collectors.collector", arguments)

        def check() -> None:
            death = collectors.find_death()
            if death is not None and death.exit_code:
                raise PeerLostError(peer=death.name, reason=f"{death}\n{death.last_lines}")

        try:
            print_all(client, options, num_collectors=options.collectors or NUM_COLLECTORS, check=check)
        except TDServeError:
            check()  # a dead collector is the cause, the timeout the effect
            raise


def run_rank(options: argparse.Namespace, rank: TorchrunRank) -> None:
    """Runs one process of a job that ``torchrun`` started: rank 0 is the learner, the others collect.

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
    store = _open_rendezvous(rank)
    if rank.rank:
        address, run = store.get(KEY).decode().split()
        collect_all(address, run, index=rank.rank - 1, local_index=rank.local_rank)
        return
    with provide_server(options.address) as address, tdserve.connect(address, timeout_s=SERVER_TIMEOUT_S) as client:
        store.set(KEY, f"{address} {options.run}")
        print_all(client, options, num_collectors=rank.world_size - 1)


def print_all(
    client: tdserve.Client, options: argparse.Namespace, *, num_collectors: int, check: Callable[[], None] | None = None
) -> None:
    """Is the learner, and prints how it goes. After every line it calls ``check``, which may raise."""
    print(f"server {client.address}; look inside: {get_own_command()} ls --address {client.address}", flush=True)
    torch.set_num_threads(1)
    limits = {"num_versions": options.versions, "max_seconds": options.max_seconds}
    with closing(lead(client, options.run, num_collectors=num_collectors, **limits)) as lines:
        for line in lines:
            print(line, flush=True)
            if check is not None:
                check()


def _open_rendezvous(rank: TorchrunRank) -> dist.Store:  # type: ignore[name-defined]
    """Returns the key-value store of this attempt: a job that is started again gets a server of its own."""
    job = dist.TCPStore(rank.master_addr, rank.master_port, is_master=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"{KEY}/{rank.restart_count}", job)  # type: ignore[attr-defined]


@contextmanager
def provide_server(address: str | None) -> Iterator[str]:
    """Yields the address of a server: the given one, or that of a server that lives as long as the block."""
    if address is not None:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="tdserve-collectors-") as folder, tdserve.Server(folder) as started:
        yield started.address


def end_on_signals() -> None:
    """Makes the first SIGINT or SIGTERM unwind the stack, so that every ``with`` closes what it opened; later ones do
    not interrupt that."""

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


if __name__ == "__main__":
    sys.exit(main())
