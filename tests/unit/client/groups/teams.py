"""The members of a group in one process, each with a client and a thread of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.groups.group import Group

TIMEOUT_S = 30.0

_numbers = itertools.count()

SMALL, LARGE = 10, 600_000
"""Floats: of a note, and of several messages down a chain."""


class Team:
    """A group of so many members; over gloo and shm sessions by turns.

    Attributes:
        clients: By rank of the first epoch.
        groups: Likewise.
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
        self.groups = self.run(lambda client, rank: client.group(self.name, size, rank), self.clients)

    def run(self, call: Callable[..., Any], over: list[Any]) -> list[Any]:
        """What a call of one of them and its number gives, for all of them at once."""
        futures = [self._threads.submit(call, each, number) for number, each in enumerate(over)]
        return [future.result(2 * TIMEOUT_S) for future in futures]

    def each(self, call: Callable[[Group], Any], ranks: list[int] | None = None) -> list[Any]:
        """What a call gives, or raises, at each member (or at those of the given numbers), all at once."""

        def outcome(group: Group, _: int) -> Any:
            try:
                return call(group)
            except tdserve.TDServeError as error:
                return error

        return self.run(outcome, [self.groups[rank] for rank in ranks] if ranks is not None else self.groups)

    def close(self) -> None:
        """Ends everything."""
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
    """A tensordict that holds a number everywhere: in nested and odd leaves, and in values."""
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
    """The number; fails when anything else is in there."""
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
