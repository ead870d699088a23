"""The exam of every kind of tensordict over a transport: what comes out equals what went in, in everything.

A class gives fixture ``connect`` and inherits the rest, as of ``service_suite``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tdserve
from tests.conformance.kinds import KINDS, ROWS
from tests.sameness import assert_same

Connect = Callable[[], tdserve.Client]

INDICES: tuple[Any, ...] = (2, slice(1, 3), [2, 0], torch.arange(ROWS) % 2 == 0)

_numbers = itertools.count()

every_kind = pytest.mark.parametrize("kind", KINDS)
with_rows = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.has_rows])
in_tables = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.in_table])


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
class KindsSuite:
    """What holds of every kind over every transport."""

    @pytest.fixture
    def client(self, connect: Connect) -> Iterator[tdserve.Client]:
        """One client."""
        with connect() as made:
            yield made

    @pytest.fixture
    def name(self) -> str:
        """Of a store that nobody has."""
        return f"kind-{next(_numbers)}"

    @every_kind
    def test_init_remote_when_read_whole_then_the_same(self, client: tdserve.Client, name: str, kind: str) -> None:
        client.init_remote(KINDS[kind].make(), name)
        expected = KINDS[kind].expected(KINDS[kind].make())
        assert_same(client.from_remote_init(name), expected)
        assert_same(client.load_memmap(name), expected)
        assert_same(client[name].to_tensordict(), expected)

    @every_kind
    def test_memmap_when_sent_anew_then_the_same(self, client: tdserve.Client, name: str, kind: str) -> None:
        client.memmap(KINDS[kind].make(), name)
        client.send(KINDS[kind].make(), name)
        assert_same(client.load_memmap(name), KINDS[kind].expected(KINDS[kind].make()))

    @every_kind
    def test_out_when_filled_then_the_same(self, client: tdserve.Client, name: str, kind: str) -> None:
        client.init_remote(KINDS[kind].make(), name)
        expected = KINDS[kind].expected(KINDS[kind].make())
        into = KINDS[kind].expected(KINDS[kind].make())
        if into.is_locked:  # what is ragged takes the place of what was there, which a lock forbids
            into, expected = into.unlock_(), expected.unlock_()
        assert client.from_remote_init(name, out=into) is into
        assert_same(into, expected)

    @with_rows
    def test_handle_when_indexed_then_as_tensordict_does(self, client: tdserve.Client, name: str, kind: str) -> None:
        client.init_remote(KINDS[kind].make(), name)
        handle = client[name]
        for index in INDICES:
            assert_same(handle[index], KINDS[kind].rows(index))

    @in_tables
    def test_replay_when_extended_then_rows_come_back(self, client: tdserve.Client, name: str, kind: str) -> None:
        rows = KINDS[kind].make()
        replay = client.create_replay(name, KINDS[kind].rows(0), 2 * ROWS, ragged=KINDS[kind].ragged)
        index = replay.extend(rows)
        assert index.tolist() == list(range(ROWS))
        assert len(replay.sample(3)) == 3
        found = replay[index]
        assert not found.is_locked
        for number in range(ROWS):  # content is all that a table keeps
            expected = KINDS[kind].rows(number).detach().unlock_()
            assert_same(found[number].exclude("index", "generation"), expected)
