"""The roles of a group's members, each in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import check_transport
from tdserve.base.deadline import Deadline
from tdserve.client.groups.epoch_entry import GroupAsk
from tdserve.client.groups.group import Group
from tdserve.transport.group_content import CallChannel
from tdserve.transport.group_gloo import GroupWork
from tests.processes import wait_for

Say = Callable[..., None]

TIMEOUT_S = 30.0
"""Timeout of calls that succeed."""

LOST_TIMEOUT_S = 5.0
"""Timeout of calls in which a member dies."""

NUM_LARGE = 2_000_000
"""Number of floats in the large leaf: 8 MB, two messages."""


def content(number: int, *, num_large: int = NUM_LARGE) -> TensorDict:
    """Returns a tensordict that holds ``number`` everywhere: small and large leaves, nested ones, a value."""
    td = TensorDict({"first": torch.full((5,), number), "n": {"large": torch.full((num_large,), float(number))}})
    td["text"] = f"text {number}"
    return td


def number_in(td: Any) -> int:
    """Returns the number in a tensordict; fails if it is torn."""
    number = int(td["first"][0])
    assert bool((td["first"] == number).all()), "torn"
    assert bool((td["n", "large"] == float(number)).all()), "torn"
    assert td["text"] == f"text {number}", "torn"
    return number


def strike_in_wait(at: int, signal_number: int) -> None:
    """Sends a signal to this process in the wait for bytes of a group that has this number, counted from now."""
    plain, num_waits = CallChannel.wait, 0

    def wait(self: CallChannel, works: Sequence[GroupWork]) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == at:
            os.kill(os.getpid(), signal_number)
        plain(self, works)

    CallChannel.wait = wait  # type: ignore[method-assign]


def survive(say: Say, address: str, name: str, size: int, rounds: int, *, transport: str = "gloo") -> None:
    """Broadcasts in an epoch in which a member dies, and goes on in the next one without it, again and again."""
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        group = client.group(name, size)
        say("together")
        for number in range(rounds):
            group.next_epoch(size + 1)
            start_s = time.monotonic()
            try:
                _broadcast(group, number, src=number % (size + 1), timeout_s=LOST_TIMEOUT_S)
                group.barrier(timeout_s=LOST_TIMEOUT_S)
                say("nothing was lost in round", number)
            except tdserve.PeerLostError:
                lost_s = time.monotonic() - start_s
            is_over = _is_over(group)
            start_s = time.monotonic()
            group.next_epoch(size)
            _broadcast(group, number + 100, src=number % size, timeout_s=TIMEOUT_S)
            group.barrier()
            say("survived", number, group.epoch, round(lost_s, 3), round(time.monotonic() - start_s, 3), is_over)


def fall(say: Say, address: str, name: str, size: int, number: int, *, at: int, transport: str = "gloo") -> None:
    """Joins a group and dies in a broadcast."""
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        group = client.group(name, size)
        strike_in_wait(at, signal.SIGKILL)
        _broadcast(group, number, src=number % size, timeout_s=LOST_TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)


def wait_in_vain(say: Say, address: str, name: str, size: int, rank: int, *, transport: str) -> None:
    """Waits for a broadcast of the last rank, which dies before it. Rank 1 begins the call after it has learned of
    that."""
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        ask = GroupAsk(client, name, backend="gloo", device=None, interface=None)  # as client.group does
        epoch = ask.join(world_size=size, rank=rank, last=None, deadline=Deadline.after(TIMEOUT_S))
        group = Group(client, ask, epoch, "gloo")
        say("together")
        if rank == size - 1:
            signal.pause()
        start_s = time.monotonic()
        if rank == 1:
            wait_for(lambda: epoch.is_lost, "the news of the loss")
        try:
            group.broadcast(None, size - 1, timeout_s=LOST_TIMEOUT_S)
        except tdserve.PeerLostError as error:
            say("lost", round(time.monotonic() - start_s, 3), error)
        group.next_epoch()
        _broadcast(group, 3, src=0, timeout_s=TIMEOUT_S)


def take_half(say: Say, address: str, name: str, *, num_bytes: int) -> None:
    """Receives from a member that dies in the middle of sending."""
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        group = client.group(name, 2, 0)
        td = TensorDict({"x": torch.zeros(num_bytes, dtype=torch.uint8)})
        start_s = time.monotonic()
        try:
            while True:
                group.recv(td, 1, timeout_s=LOST_TIMEOUT_S)
        except tdserve.PeerLostError as error:
            say("lost", round(time.monotonic() - start_s, 3), error)


def give_half(say: Say, address: str, name: str, *, num_bytes: int) -> None:
    """Sends more than its sockets take at once, and dies."""
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        group = client.group(name, 2, 1)
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        strike_in_wait(3, signal.SIGKILL)  # two waits are for the agreement
        group.send(TensorDict({"x": torch.ones(num_bytes, dtype=torch.uint8)}), 0)


def _broadcast(group: Group, number: int, *, src: int, timeout_s: float) -> None:
    td = content(number) if group.rank == src else None
    assert number_in(group.broadcast(td, src, timeout_s=timeout_s)) == number


def _is_over(group: Group) -> bool:
    """Returns whether every later call raises the same error."""
    try:
        group.barrier(timeout_s=LOST_TIMEOUT_S)
    except tdserve.PeerLostError:
        return True
    return False


def stand(
    say: Say, address: str, name: str, size: int, rank: int, *, transport: str = "gloo", at: int = 0, timeout_s: float
) -> None:
    """Broadcasts until the epoch is over, and prints how that was noticed. Goes on with one member less, then with all.

    Args:
        at: Number of the wait in which it stops itself; 0: never.
        timeout_s: Timeout of every call.
    """
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        group = client.group(name, size, rank)
        if at:
            strike_in_wait(at, signal.SIGSTOP)
        start_s = time.monotonic()
        try:
            while True:
                start_s = time.monotonic()
                _broadcast(group, group.epoch, src=0, timeout_s=timeout_s)
                group.barrier(timeout_s=timeout_s)
        except tdserve.TDServeError as error:
            say("over", type(error).__name__, round(time.monotonic() - start_s, 2), str(error).replace("\n", " "))
        assert _is_over(group)
        if not at:
            start_s = time.monotonic()
            group.next_epoch(size - 1)
            _broadcast(group, group.epoch, src=0, timeout_s=TIMEOUT_S)
            group.barrier()
            say("again", group.rank, group.world_size, group.epoch, round(time.monotonic() - start_s, 2))
        group.next_epoch(None if at else size)
        _broadcast(group, group.epoch, src=size - 1, timeout_s=TIMEOUT_S)
        group.barrier()
        say("all", group.rank, group.world_size, group.epoch)
