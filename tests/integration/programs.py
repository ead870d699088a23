"""Client programs for the tests of faults: ``python -m tests.integration.programs COMMAND ADDRESS ...``.

Each prints what it has done, one line at a time. ``write`` and ``read`` can be told to send a signal to themselves, or
to
any process, in the very middle of a transfer: when their channel is about to move data message number N.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.mail import MAIL_TAG

ROW_NBYTES = 1 << 20
"""Four rows make one data message."""

NUM_ROWS = 16
"""Of one write: 16 MiB, four messages."""


def row() -> TensorDict:
    """The structure of one row: its content repeats one number, so that a torn row shows."""
    return TensorDict({"number": torch.zeros((), dtype=torch.int64), "body": torch.zeros(ROW_NBYTES // 8).double()}, [])


def rows(number: int, num_rows: int = NUM_ROWS) -> TensorDict:
    """Rows that hold ``number`` everywhere."""
    body = torch.full((num_rows, ROW_NBYTES // 8), float(number), dtype=torch.float64)
    return TensorDict({"number": torch.full((num_rows,), number), "body": body}, [num_rows])


def numbers_in(td: Any) -> list[int]:
    """The number of each row; fails when a row is not whole."""
    assert (td["body"] == td["number"].double().unsqueeze(-1)).all(), "a row is torn"
    found: list[int] = td["number"].tolist()
    return found


def write(client: tdserve.Client, kind: str, name: str, number: int) -> object:
    """One write of 16 MiB."""
    if kind == "extend":
        return client.replay(name).extend(rows(number)).tolist()
    return getattr(client, kind)(*((name, rows(number)) if kind == "publish" else (rows(number), name)))


def read(client: tdserve.Client, kind: str, name: str) -> object:
    """One read of 16 MiB: the numbers found."""
    if kind == "sample":
        found = client.replay(name).sample(NUM_ROWS)
    elif kind == "latest":
        weights = client.latest(name)
        assert weights is not None
        found = weights.data
    else:
        found = client.from_remote_init(name)
    return sorted(set(numbers_in(found)))


def strike_at(message: int, number: int, pid: int, *, counts_mail: bool) -> None:
    """Sends a signal when data message number ``message`` (from 1) of this process is about to move, once."""
    num_moved = 0

    def counted(move: Callable[..., Any]) -> Callable[..., Any]:
        def moving(channel: GlooChannel, buffer: torch.Tensor, tag: int) -> Any:
            nonlocal num_moved
            if counts_mail or tag != MAIL_TAG:
                num_moved += 1
                if num_moved == message:
                    os.kill(pid or os.getpid(), number)
            return move(channel, buffer, tag)

        return moving

    GlooChannel.send = counted(GlooChannel.send)  # type: ignore[method-assign]
    GlooChannel.recv = counted(GlooChannel.recv)  # type: ignore[method-assign]


def say(*words: object) -> None:
    """One line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def stream(client: tdserve.Client, name: str, writer: int, num_writes: int) -> None:
    """Extends again and again; row ``writer * 1000 + i`` belongs to write i. Says each number once it is stored."""
    replay = client.replay(name)
    for index in range(num_writes):
        replay.extend(rows(writer * 1000 + index, 2))
        say("stored", writer * 1000 + index)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["write", "read", "stream", "own", "tour", "wait"])
    parser.add_argument("address")
    parser.add_argument("kind")
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--num-writes", type=int, default=0)
    parser.add_argument("--at", type=int, default=0, help="data message before which a signal is sent")
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    parser.add_argument("--pid", type=int, default=0, help="who gets it; 0 is this process")
    parser.add_argument("--mail", action="store_true", help="mail counts as data messages too")
    parser.add_argument("--timeout", type=float, default=20.0)
    given = parser.parse_args()
    if given.command == "own":  # a process that owns a server: ``address`` is the root here
        say(tdserve.Server(given.address, port=0).start().address)
        signal.pause()
    client = tdserve.connect(given.address, transport="gloo", timeout_s=given.timeout)
    say("connected")
    if given.at:
        strike_at(given.at, given.signal, given.pid, counts_mail=given.mail)
    try:
        if given.command == "write":
            say("done", write(client, given.kind, given.name, given.number))
        elif given.command == "read":
            say("done", read(client, given.kind, given.name))
        elif given.command == "tour":
            tour(client)
        elif given.command == "wait":
            wait(client, given.name, num_rows=int(given.kind))
        else:
            stream(client, given.name, given.number, given.num_writes)
            say("end")
    except tdserve.TDServeError as error:
        say("error", type(error).__name__, error.retryable, error)
    client.close()


def wait(client: tdserve.Client, name: str, *, num_rows: int) -> None:
    """A sample that waits until it is interrupted."""
    replay = client.replay(name)
    try:
        say("waits")  # inside: whoever reads it may interrupt at once
        replay.sample(num_rows, timeout_s=60.0)
    except KeyboardInterrupt:
        say("interrupted")


def tour(client: tdserve.Client) -> None:
    """Every kind of call once, with content that goes over the data transport."""
    replay = client.create_replay("tour-replay", like=row(), capacity=2 * NUM_ROWS)
    replay.extend(rows(7))
    client.publish("tour-weights", rows(8))
    client.init_remote(rows(9), "tour-tensordict")
    kinds = (("sample", "tour-replay"), ("latest", "tour-weights"), ("from_remote_init", "tour-tensordict"))
    say("found", *(read(client, kind, name) for kind, name in kinds))
    say("transports", *sorted(client.stats()["transports"]))


if __name__ == "__main__":
    main()
