from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.arrivals import decode_extend_columns
from tdserve.server.tables.rule_keys import name_group_column
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create, path
from tests.unit.server.world import Loop, World

CLIENT = bytes(range(16))


def make_request(num_rows: int = 3, **fields: Any) -> control_pb2.ExtendRequest:
    """A request without content."""
    return control_pb2.ExtendRequest(store="r", num_rows=num_rows, **fields)


def floats(*numbers: float) -> control_pb2.RowColumn:
    """Encodes priorities as requests have them."""
    return control_pb2.RowColumn(data=np.array(numbers, "<f8").tobytes())


def flags(content: bytes) -> control_pb2.RowColumn:
    """Encodes ends as requests have them."""
    return control_pb2.RowColumn(data=content)


@pytest.fixture
def prioritized(world: World, run: Loop) -> OpenedStore:
    """A replay whose rows have priorities."""
    return create(world, run, sampler=Prioritized())


def test_arriving_when_nothing_is_said_then_plain(world: World, run: Loop) -> None:
    columns = decode_extend_columns(create(world, run), CLIENT, make_request())
    assert (columns.arrival.writer, columns.arrival.keys, columns.arrival.priorities) == (CLIENT, None, None)
    assert columns.make_arrival(world.stores.get("r"), {}) is columns.arrival


@pytest.mark.parametrize(("given", "each"), [((0.5, 0.0, 2.0), [0.5, 0.0, 2.0]), ((3.0,), [3.0, 3.0, 3.0])])
def test_arriving_when_priorities_are_given_then_one_per_row(
    prioritized: OpenedStore, given: tuple[float, ...], each: list[float]
) -> None:
    found = decode_extend_columns(prioritized, CLIENT, make_request(priorities=floats(*given))).arrival
    assert found.priorities is not None
    assert found.priorities.tolist() == each


@pytest.mark.parametrize("given", [(1.0, 2.0), (1.0, -1.0, 1.0), (float("nan"),), (float("inf"),)])
def test_arriving_when_a_priority_cannot_be_then_refused(prioritized: OpenedStore, given: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_extend_columns(prioritized, CLIENT, make_request(priorities=floats(*given)))
    assert caught.value.argument == "priority"


def test_arriving_when_one_priority_is_of_absurdly_many_rows_then_takes_no_memory(prioritized: OpenedStore) -> None:
    columns = decode_extend_columns(prioritized, CLIENT, make_request(2**45, priorities=floats(1.0)))
    assert columns.num_rows == 2**45  # the table refuses so many


def test_arriving_when_nothing_uses_priorities_then_refused(world: World, run: Loop) -> None:
    with pytest.raises(InvalidRequestError, match="'r' has neither a sampler nor a remover that uses priorities"):
        decode_extend_columns(create(world, run), CLIENT, make_request(priorities=floats(1.0)))


def test_arriving_when_some_leaves_are_given_then_their_numbers(prioritized: OpenedStore) -> None:
    found = decode_extend_columns(prioritized, CLIENT, make_request(keys=[path("n"), path("a")])).arrival
    assert found.keys is not None
    assert list(found.keys) == sorted([*prioritized.find_numbers(("a",)), *prioritized.find_numbers(("n", "w"))])
    with pytest.raises(KeyNotFoundError):
        decode_extend_columns(prioritized, CLIENT, make_request(keys=[path("no")]))


def test_arriving_when_rows_form_trajectories_then_has_their_writer_and_their_ends(world: World, run: Loop) -> None:
    store = create(world, run, sampler=Slices(slice_len=2))
    found = decode_extend_columns(store, CLIENT, make_request(writer=4, ends=flags(b"\0\1\0"))).arrival
    assert found.writer == (CLIENT, 4)
    assert found.ends is not None
    assert found.ends.tolist() == [False, True, False]
    assert decode_extend_columns(store, bytes(16), make_request()).arrival.writer != found.writer
    with pytest.raises(InvalidRequestError):
        decode_extend_columns(store, CLIENT, make_request(ends=flags(b"\0\1")))


@pytest.mark.parametrize("keys", [[path("g")], [path("n"), path("g")]])
def test_arriving_when_a_leaf_that_orders_rows_is_lacking_then_refused(world: World, run: Loop, keys: Any) -> None:
    store = create(world, run, sampler=Slices(slice_len=2, trajectory_key="a"))
    with pytest.raises(InvalidRequestError, match="'a'"):
        decode_extend_columns(store, CLIENT, make_request(keys=keys))
    found = decode_extend_columns(store, CLIENT, make_request(keys=[*keys, path("a")])).arrival.keys
    assert (found is None) == (len(keys) == 2)  # then they are all


def test_make_arrival_when_an_end_key_is_set_then_ends_are_those_and_the_writers(world: World, run: Loop) -> None:
    store = create(world, run, sampler=Slices(slice_len=2, end_key=("n", "w")))
    column = np.array([[0, 0, 0], [0, 0, 5], [0, 0, 0]], "<i8").tobytes()
    found = decode_extend_columns(store, CLIENT, make_request(ends=flags(b"\1\0\0"))).make_arrival(
        store, {("n", "w"): column}
    )
    assert found.ends is not None
    assert found.ends.tolist() == [True, True, False]
    alone = decode_extend_columns(store, CLIENT, make_request()).make_arrival(store, {("n", "w"): column})
    assert alone.ends is not None
    assert alone.ends.tolist() == [False, True, False]


def test_make_arrival_when_a_trajectory_key_and_a_group_are_known_then_both(world: World, run: Loop) -> None:
    store = create(world, run, sampler=Slices(slice_len=2, trajectory_key="a"))
    store.group_keys.append(("g",))
    found = decode_extend_columns(store, CLIENT, make_request()).make_arrival(
        store, {("a",): np.array([7, 8, 7], "<i8").tobytes(), ("g",): np.array([1, 1, 2], "<i4").tobytes()}
    )
    assert found.ids is not None
    assert found.ids.tolist() == [7, 8, 7]
    assert found.groups[name_group_column(("g",))].tolist() == [1, 1, 2]
    assert found.ends is None
