"""The exam of every kind of tensordict over a transport: what comes out equals what went in, in everything.

A class gives fixture ``connect`` and inherits the rest, as of ``service_suite``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import pytest
import torch

import tdserve
from tests.conformance.kinds import KINDS, ROWS, Kind
from tests.sameness import assert_same

Connect = Callable[[], tdserve.Client]

INDICES: tuple[Any, ...] = (2, slice(1, 3), [2, 0], torch.arange(ROWS) % 2 == 0)

_numbers = itertools.count()

Test = TypeVar("Test", bound=Callable[..., None])


def of_kinds(which: str) -> Callable[[Test], Test]:
    """A test for kinds of which this is true."""

    def mark(test: Test) -> Test:
        test.of_kinds = which  # type: ignore[attr-defined]  # functions take attributes
        return test

    return mark


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
class KindsSuite:
    """What holds of every kind over every transport.

    Attributes:
        kinds: Those that are tried, by name.
    """

    kinds: ClassVar[dict[str, Kind]] = KINDS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test for each kind that it is for."""
        if "kind" in metafunc.fixturenames:
            which = getattr(metafunc.function, "of_kinds", "")
            kinds = {name: kind for name, kind in self.kinds.items() if not which or getattr(kind, which)}
            metafunc.parametrize("kind", list(kinds.values()), ids=list(kinds))

    @pytest.fixture
    def client(self, connect: Connect) -> Iterator[tdserve.Client]:
        """One client."""
        with connect() as made:
            yield made

    @pytest.fixture
    def name(self) -> str:
        """Of a store that nobody has."""
        return f"kind-{next(_numbers)}"

    def test_init_remote_when_read_whole_then_the_same(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        client.init_remote(kind.make(), name)
        expected = kind.expected(kind.make())
        assert_same(client.from_remote_init(name), expected)
        assert_same(client.load_memmap(name), expected)
        assert_same(client[name].to_tensordict(), expected)

    def test_memmap_when_sent_anew_then_the_same(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        client.memmap(kind.make(), name)
        client.send(kind.make(), name)
        assert_same(client.load_memmap(name), kind.expected(kind.make()))

    def test_out_when_filled_then_the_same(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        client.init_remote(kind.make(), name)
        expected = kind.expected(kind.make())
        into = kind.expected(kind.make())
        if into.is_locked:  # what is ragged takes the place of what was there, which a lock forbids
            into, expected = into.unlock_(), expected.unlock_()
        assert client.from_remote_init(name, out=into) is into
        assert_same(into, expected)

    @of_kinds("has_rows")
    def test_handle_when_indexed_then_as_tensordict_does(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        client.init_remote(kind.make(), name)
        handle = client[name]
        for index in INDICES:
            assert_same(handle[index], kind.rows(index))

    @of_kinds("in_table")
    def test_replay_when_extended_then_rows_come_back(self, client: tdserve.Client, name: str, kind: Kind) -> None:
        rows = kind.make()
        replay = client.create_replay(name, kind.rows(0), 2 * ROWS, ragged=kind.ragged)
        index = replay.extend(rows)
        assert index.tolist() == list(range(ROWS))
        assert len(replay.sample(3)) == 3
        found = replay[index]
        assert not found.is_locked
        for number in range(ROWS):  # content is all that a table keeps
            expected = kind.rows(number).detach().unlock_()
            assert_same(found[number].exclude("index", "generation"), expected)
