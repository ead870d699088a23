"""Programs that clients run over gloo in the tests of faults: ``python -m tests.integration.programs COMMAND ADDRESS``.

Each prints what it has done, one line at a time. ``move`` can be told to send a signal to itself, or to any process, in
the very middle of a transfer: when its channel is about to move data message number N. All programs that ``say``
something are children of ``ForkedClients``, and start at once. The commands are for tests that need a process from its
beginning on.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import check_transport
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.message_channel import MAIL_TAG

Say = Callable[..., None]

TIMEOUT_S = 60.0
"""Timeout of every call."""

ROW_NBYTES = 1 << 20
"""Four rows make one data message."""

NUM_ROWS = 16
"""Rows of one write: 16 MiB, four messages."""


def row() -> TensorDict:
    """Returns the structure of one row. Its content repeats one number, so that a torn row shows."""
    return TensorDict({"number": torch.zeros((), dtype=torch.int64), "body": torch.zeros(ROW_NBYTES // 8).double()}, [])


def rows(number: int, num_rows: int = NUM_ROWS) -> TensorDict:
    """Returns rows that hold ``number`` everywhere."""
    body = torch.full((num_rows, ROW_NBYTES // 8), float(number), dtype=torch.float64)
    return TensorDict({"number": torch.full((num_rows,), number), "body": body}, [num_rows])


def numbers_in(td: Any) -> list[int]:
    """Returns the number of each row; fails if a row is torn."""
    assert (td["body"] == td["number"].double().unsqueeze(-1)).all(), "a row is torn"
    found: list[int] = td["number"].tolist()
    return found


def write(client: tdserve.Client, kind: str, name: str, number: int) -> object:
    """Writes 16 MiB."""
    if kind == "extend":
        return client.replay(name).extend(rows(number)).tolist()
    return getattr(client, kind)(*((name, rows(number)) if kind == "publish" else (rows(number), name)))


def read(client: tdserve.Client, kind: str, name: str) -> object:
    """Reads 16 MiB and returns the numbers found."""
    if kind == "sample":
        found = client.replay(name).sample(NUM_ROWS)
    elif kind == "latest":
        weights = client.latest(name)
        assert weights is not None
        found = weights.data
    else:
        found = client.from_remote_init(name)
    return sorted(set(numbers_in(found)))


def strike_at(message: int, number: int, pid: int, *, counts_mail: bool = False) -> None:
    """Sends a signal, once, when data message number ``message`` (from 1) of this process is about to move; 0 is
    never."""
    num_moved = 0

    def counted(move: Callable[..., Any]) -> Callable[..., Any]:
        def moving(channel: GlooChannel, buffer: torch.Tensor, tag: int) -> Any:
            nonlocal num_moved
            if counts_mail or tag != MAIL_TAG:
                num_moved += 1
                if num_moved == message:
                    os.kill(pid, number)
            return move(channel, buffer, tag)

        return moving

    GlooChannel.send = counted(GlooChannel.send)  # type: ignore[method-assign]
    GlooChannel.recv = counted(GlooChannel.recv)  # type: ignore[method-assign]


def worker_of(client: tdserve.Client) -> int:
    """Returns the process of the data worker that serves a client."""
    stats = client.stats()
    (number,) = [each["worker"] for each in stats["sessions"] if each["session"] == stats["session"]]
    (pid,) = [worker["pid"] for worker in stats["workers"] if worker["worker"] == number]
    return int(pid)


def move(
    say: Say,
    address: str,
    kind: str,
    name: str,
    number: int = 0,
    *,
    at: int,
    signal_number: int = signal.SIGKILL,
    at_worker: bool = False,
    pid: int = 0,
    counts_mail: bool = False,
) -> None:
    """Makes one write or one read. Before data message ``at`` it sends a signal to itself, to the data worker that
    serves it, or to another process."""
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        say("connected")
        victim = worker_of(client) if at_worker else pid or os.getpid()
        strike_at(at, signal_number, victim, counts_mail=counts_mail)
        is_read = kind in ("sample", "latest", "from_remote_init")
        say("done", read(client, kind, name) if is_read else write(client, kind, name, number))


def stream(
    say: Say, address: str, name: str, writer: int, num_writes: int, *, at: int = 0, signal_number: int = signal.SIGKILL
) -> None:
    """Extends again and again; row ``writer * 1000 + i`` belongs to write i. Prints each number once it is stored."""
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        strike_at(at, signal_number, os.getpid())
        replay = client.replay(name)
        for index in range(num_writes):
            replay.extend(rows(writer * 1000 + index, 2))
            say("stored", writer * 1000 + index)
        say("end")


def wait(say: Say, address: str, name: str, num_rows: int) -> None:
    """Samples, and waits until it is interrupted."""
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        say("connected")
        replay = client.replay(name)
        try:
            say("waits")  # inside the call: the test may interrupt as soon as it reads this
            replay.sample(num_rows, timeout_s=60.0)
        except KeyboardInterrupt:
            say("interrupted")


def publish_versions(say: Say, address: str, name: str, size: int, last: int) -> None:
    """Publishes versions whose every number is that of the version."""
    with tdserve.connect(address) as client:
        for number in range(1, last + 1):
            leaves = {f"layer{at}": {"weight": torch.full((size,), float(number))} for at in range(4)}
            content = TensorDict({**leaves, "scale": torch.tensor(float(number))}, [])
            client.publish(name, content, metadata={"n": number})


def put_entries(say: Say, address: str, name: str, keys: list[str], *, transport: str) -> None:
    """Puts the same number at all keys again and again; prints each number that is acknowledged."""
    kv = tdserve.connect(address, transport=check_transport(transport)).kv(name)
    for number in itertools.count(1):
        kv.put(keys, torch.full((len(keys), 20_000), number))
        say(number)


def main() -> None:
    """Runs the command that the module describes."""
    command, address = sys.argv[1:]
    if command in ("own", "own-and-fork"):  # a process that owns a server: ``address`` is the root here
        server = tdserve.Server(address, port=0).start()
        print_line(server.address)
        if command == "own-and-fork" and os.fork() == 0:
            server.shutdown()  # does nothing, since the server is not this process's
            print_line(os.getpid())
        signal.pause()
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        print_line("connected")
        tour(client)


def print_line(*words: object) -> None:
    """Prints a line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def tour(client: tdserve.Client) -> None:
    """Makes every kind of call once, with content that goes over the data transport."""
    replay = client.create_replay("tour-replay", like=row(), capacity=2 * NUM_ROWS)
    replay.extend(rows(7))
    client.publish("tour-weights", rows(8))
    client.init_remote(rows(9), "tour-tensordict")
    kinds = (("sample", "tour-replay"), ("latest", "tour-weights"), ("from_remote_init", "tour-tensordict"))
    print_line("found", *(read(client, kind, name) for kind, name in kinds))
    print_line("transports", *sorted(client.stats()["transports"]))


if __name__ == "__main__":
    main()
