"""The members of a group in one process, each with its own client and thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.groups.epoch import GroupEpoch
from tdserve.client.groups.epoch_entry import GroupAsk
from tdserve.client.groups.group import Group

TIMEOUT_S = 30.0

_numbers = itertools.count()

SMALL, LARGE = 10, 600_000
"""Numbers of floats: little content, and several messages down a chain."""


class Team:
    """A group of a given number of members, with sessions over gloo and shm in turn.

    Attributes:
        clients: The clients by rank of the first epoch.
        groups: Likewise.
        epochs: Their first epochs.
    """

    def __init__(self, server: tdserve.Server, size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name = f"team-{next(_numbers)}"
        transports = itertools.cycle(("gloo", "shm"))
        self.clients = [
            server.client(transport=transport, timeout_s=timeout_s)
            for _, transport in zip(range(size), transports, strict=False)
        ]
        self._threads = ThreadPoolExecutor(size + 1)
        self.groups: list[Group] = []
        asks = [
            GroupAsk(client, self.name, backend="gloo", device=None, interface=None)  # as client.group does
            for client in self.clients
        ]
        self.epochs: list[GroupEpoch] = self.run(
            lambda ask, rank: ask.join(world_size=size, rank=rank, last=None, deadline=Deadline.after(timeout_s)), asks
        )
        self.groups = [
            Group(client, ask, epoch, "gloo")
            for client, ask, epoch in zip(self.clients, asks, self.epochs, strict=True)
        ]

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Makes a call in a thread of its own."""
        return self._threads.submit(call, *arguments, **options)

    def run(self, call: Callable[..., Any], over: list[Any]) -> list[Any]:
        """Calls a function with each member and its number, all at the same time; returns the results."""
        futures = [self.submit(call, each, number) for number, each in enumerate(over)]
        return [future.result(2 * TIMEOUT_S) for future in futures]

    def each(self, call: Callable[[Group], Any], ranks: list[int] | None = None) -> list[Any]:
        """Returns the result or error of a call for each member (or those with the given numbers), all at the same
        time."""

        def outcome(group: Group, _: int) -> Any:
            try:
                return call(group)
            except tdserve.TDServeError as error:
                return error

        return self.run(outcome, [self.groups[rank] for rank in ranks] if ranks is not None else self.groups)

    def close(self) -> None:
        """Closes everything."""
        for group in self.groups:
            group.close()
        for client in self.clients:
            client.close()
        self._threads.shutdown()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def content(number: int, num_floats: int = SMALL) -> TensorDict:
    """Returns a tensordict that holds a number everywhere: in nested and odd leaves, and in values."""
    td = TensorDict(
        {
            "a": torch.full((2, 3), number, dtype=torch.int64),
            "n": {"b": torch.full((2, num_floats), float(number)), "flag": torch.tensor([True, False])},
        },
        [2],
    )
    td["text"] = [f"first {number}", f"second {number}"]
    td.set_non_tensor("same", {"number": number})
    return td


def number_in(td: Any, num_floats: int = SMALL) -> int:
    """Returns the number; fails if there is any other content."""
    number = int(td["a"][0, 0])
    expected = content(number, num_floats)
    assert set(td.keys(True, True)) == set(expected.keys(True, True))
    assert torch.equal(td["a"], expected["a"])
    assert torch.equal(td["n", "b"], expected["n", "b"])
    assert torch.equal(td["n", "flag"], expected["n", "flag"])
    assert list(td["text"]) == list(expected["text"])
    assert td["same"] == {"number": number}
    assert td.batch_size == expected.batch_size
    return number
