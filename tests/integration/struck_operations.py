"""Operations during which a process is killed at a failpoint. Each is prepared, carried out in a process of its own,
and checked afterwards.

``OPERATIONS`` names them. ``act`` is a role of forked clients: it carries one out, with a failpoint
switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import tdserve
from tdserve.base import failpoints
from tdserve.base.config import check_transport

State = Literal["old", "new", "lost"]
"""A state: the one before the operation, the one after it, or rows that answer ``CorruptDataError``."""

TIMEOUT_S = 60.0
NUM_FLOATS = 2_000
"""Numbers in a row: enough for stores not to be small, and for content to go over the channel."""

NUM_ROWS = 4
LONG_ROWS = 20_000
"""Rows of an extend that is committed in parts."""

MAX_EXTENDS = 200
"""Within so many extends, a writer that may claim rows gets to each step of a claim."""


class Operation(NamedTuple):
    """One operation.

    Attributes:
        prepare: Creates the state before the operation.
        act: Changes it.
        look: Returns the state; raises AssertionError if anything is there by half.
    """

    prepare: Callable[[Any, str], object]
    act: Callable[[Any, str], object]
    look: Callable[[Any, str], State]


def rows(number: int, num_rows: int = NUM_ROWS, *, text: bool = False, num_floats: int = NUM_FLOATS) -> TensorDict:
    """Returns rows that hold ``number`` everywhere, so that a torn row shows."""
    body = torch.full((num_rows, num_floats), float(number))
    td = TensorDict({"first": torch.full((num_rows,), number), "body": body}, [num_rows])
    if text:
        td["text"] = NonTensorStack(*[str(number)] * num_rows)
    return td


def read_numbers(td: TensorDictBase) -> list[int]:
    """Returns the numbers of rows. Raises AssertionError if one is torn."""
    assert bool((td["body"] == td["first"][:, None]).all()), "a row is torn"
    numbers: list[int] = td["first"].tolist()
    if td.get("text", None) is not None:
        assert list(td["text"]) == [str(number) for number in numbers]
    return numbers


def _prepare_nothing(client: Any, name: str) -> None:
    """The name is free."""


def _is_there(client: Any, name: str) -> bool:
    return name in client.stores()


# ---------------------------------------------------------------- creation


def _create(client: Any, name: str) -> None:
    client.create_replay(name, rows(0)[0], 64)


def _look_for_table(client: Any, name: str) -> State:
    if not _is_there(client, name):
        return "old"
    assert client.replay(name).info()["capacity"] == 64
    assert len(client.replay(name)) == 0
    return "new"


def _create_small(client: Any, name: str) -> None:
    client.memmap(rows(1, num_floats=2, text=True), name)


def _fill(client: Any, name: str) -> None:
    client.memmap(rows(1, 64, text=True), name)


def _look_for_content(client: Any, name: str) -> State:
    if not _is_there(client, name):
        return "old"
    assert set(read_numbers(client[name].to_tensordict())) == {1}
    return "new"


def _delete(client: Any, name: str) -> None:
    client.delete(name)


def _look_for_deletion(client: Any, name: str) -> State:
    if not _is_there(client, name):
        return "new"
    assert set(read_numbers(client[name].to_tensordict())) == {1}
    return "old"


# ---------------------------------------------------------------- rows


def _make_table(client: Any, name: str) -> None:
    """Makes a table without claims: its sampler needs priorities."""
    client.create_replay(name, rows(0)[0], 64, sampler=tdserve.Prioritized()).extend(rows(1))


def _extend(client: Any, name: str) -> None:
    client.replay(name).extend(rows(2))


def _look_at_rows(client: Any, name: str) -> State:
    table = client.replay(name)
    numbers = read_numbers(table[:])
    assert numbers[:NUM_ROWS] == [1] * NUM_ROWS
    assert numbers[NUM_ROWS:] in ([], [2] * NUM_ROWS), "a part of an extend is visible, or it is stored twice"
    assert set(read_numbers(table.sample(64))) <= set(numbers)
    return "new" if len(numbers) > NUM_ROWS else "old"


def _make_long_table(client: Any, name: str) -> None:
    client.create_replay(name, rows(0, num_floats=2)[0], 2 * LONG_ROWS)


def _extend_long(client: Any, name: str) -> None:
    client.replay(name).extend(rows(2, LONG_ROWS, num_floats=2))


def _look_at_long_table(client: Any, name: str) -> State:
    numbers = read_numbers(client.replay(name)[:])
    assert numbers in ([], [2] * LONG_ROWS)
    return "new" if numbers else "old"


def _delete_rows(client: Any, name: str) -> None:
    client.replay(name).delete(torch.arange(NUM_ROWS))


def _look_for_deleted_rows(client: Any, name: str) -> State:
    numbers = read_numbers(client.replay(name)[:])
    assert numbers in ([], [1] * NUM_ROWS)
    return "old" if numbers else "new"


def _make_queue(client: Any, name: str) -> None:
    client.create_queue(name, rows(0)[0], max_size=64).extend(rows(1))


def _take(client: Any, name: str) -> None:
    with client.queue(name).take(NUM_ROWS):
        pass


def _look_at_queue(client: Any, name: str) -> State:
    queue = client.queue(name)
    if len(queue) == 0:
        return "new"
    taken = queue.take(NUM_ROWS)
    assert read_numbers(taken.rows) == [1] * NUM_ROWS
    taken.give_back()
    return "old"


# ---------------------------------------------------------------- claims


def _make_ring(client: Any, name: str) -> None:
    client.create_replay(name, rows(0)[0], 4 * MAX_EXTENDS)


def _extend_often(client: Any, name: str) -> None:
    """Extends until a process dies; each extend has a number of its own."""
    table = client.replay(name)
    for number in range(1, MAX_EXTENDS):
        table.extend(rows(number, 2))


def _look_at_ring(client: Any, name: str) -> State:
    numbers = read_numbers(client.replay(name)[:])
    newest = max(numbers, default=0)
    assert sorted(numbers) == sorted([*range(1, newest + 1)] * 2), "an extend is lost, doubled or half visible"
    return "new" if newest else "old"


# ---------------------------------------------------------------- overwrites, keys


def _make_store(client: Any, name: str) -> None:
    client.memmap(rows(1, text=True), name)


def _overwrite(client: Any, name: str) -> None:
    client[name][1:3] = rows(2, 2, text=True)


def _look_at_store(client: Any, name: str) -> State:
    try:
        numbers = read_numbers(client[name].to_tensordict())
    except tdserve.CorruptDataError:
        return "lost"
    assert numbers in ([1, 1, 1, 1], [1, 2, 2, 1])
    return "old" if numbers == [1] * NUM_ROWS else "new"


def _add_keys(client: Any, name: str) -> None:
    added = TensorDict({"number": torch.full((NUM_ROWS,), 2), "note": NonTensorStack(*["2"] * NUM_ROWS)}, [NUM_ROWS])
    client[name].update({"added": added, "also": torch.full((NUM_ROWS, NUM_FLOATS), 2.0)})


def _look_at_keys(client: Any, name: str) -> State:
    td = client[name].to_tensordict()
    assert read_numbers(td.select("first", "body", "text")) == [1] * NUM_ROWS
    if td.get("added", None) is None:
        assert td.get("also", None) is None
        return "old"
    assert td["added", "number"].tolist() == [2] * NUM_ROWS
    assert list(td["added", "note"]) == ["2"] * NUM_ROWS
    assert bool((td["also"] == 2).all())
    return "new"


def _add_leaves(client: Any, name: str) -> None:
    row = rows(0)[0]
    row["late"] = torch.zeros(3)
    client.replay(name).add_leaves(row)


def _look_at_leaves(client: Any, name: str) -> State:
    found = client.replay(name)[:]
    assert read_numbers(found) == [1] * NUM_ROWS
    if found.get("late", None) is None:
        return "old"
    assert found["late"].tolist() == [[0.0] * 3] * NUM_ROWS
    return "new"


# ---------------------------------------------------------------- versions, entries


def _weights(number: int) -> TensorDict:
    return TensorDict({"w": torch.full((NUM_FLOATS,), float(number)), "text": str(number)}, [])


def _publish_first(client: Any, name: str) -> None:
    client.publish(name, _weights(1), metadata={"number": 1})


def _publish(client: Any, name: str) -> None:
    client.publish(name, _weights(2), metadata={"number": 2})


def _look_at_weights(client: Any, name: str) -> State:
    found = client.latest(name)
    number = found.metadata["number"]
    assert found.data["text"] == str(number)
    assert bool((found.data["w"] == number).all())
    numbers = [each.version for each in client.versions(name)]
    assert numbers == list(range(1, number + 1)), "it was published twice, or skips a number"
    return "new" if number == 2 else "old"


def _make_entries(client: Any, name: str) -> None:
    client.create_kv(name).put(["a", "b"], [rows(1), rows(1)])


def _put(client: Any, name: str) -> None:
    client.kv(name).put(["a", "b"], [rows(2), rows(2)])


def _look_at_entries(client: Any, name: str) -> State:
    found = client.kv(name)
    numbers = {number for key in "ab" for number in read_numbers(found[key])}
    assert len(numbers) == 1, "a part of a put is visible"
    return "new" if numbers == {2} else "old"


# ---------------------------------------------------------------- checkpoints, moves


def place_of(name: str) -> Path:
    """Returns where the checkpoint of an operation goes: the name is a path."""
    return Path(name)


def _make_for_checkpoint(client: Any, name: str) -> None:
    store = place_of(name).name
    _make_table(client, store)
    _extend(client, store)


def _checkpoint(client: Any, name: str) -> None:
    client.checkpoint(place_of(name), timeout_s=TIMEOUT_S)


def _look_at_place(client: Any, name: str) -> State:
    place, store = place_of(name), place_of(name).name
    assert _look_at_rows(client, store) == "new"
    found = list(place.glob("checkpoints/*")) if place.exists() else []
    if not found:
        return "old"
    restored = client.restore(place, names=[store], prefix=f"restored{len(client.stores())}-")
    assert _look_at_rows(client, restored[0]) == "new"
    return "new"


def _move(client: Any, name: str) -> None:
    client.rebalance(name, 1 - client.find_server(name), timeout_s=TIMEOUT_S)


def _make_movable(client: Any, name: str) -> None:
    _make_table(client, name)
    client.rebalance(name, 0)


def _look_at_moved(client: Any, name: str) -> State:
    assert _look_at_rows(client, name) == "old"  # whoever asks for it finishes the move
    assert client.stores().count(name) == 1
    return "new" if client.find_server(name) == 1 else "old"


OPERATIONS = {
    "create": Operation(_prepare_nothing, _create, _look_for_table),
    "create small": Operation(_prepare_nothing, _create_small, _look_for_content),
    "fill": Operation(_prepare_nothing, _fill, _look_for_content),
    "delete": Operation(_fill, _delete, _look_for_deletion),
    "extend": Operation(_make_table, _extend, _look_at_rows),
    "extend long": Operation(_make_long_table, _extend_long, _look_at_long_table),
    "extend often": Operation(_make_ring, _extend_often, _look_at_ring),
    "delete rows": Operation(_make_table, _delete_rows, _look_for_deleted_rows),
    "take": Operation(_make_queue, _take, _look_at_queue),
    "overwrite": Operation(_make_store, _overwrite, _look_at_store),
    "add keys": Operation(_make_store, _add_keys, _look_at_keys),
    "add leaves": Operation(_make_table, _add_leaves, _look_at_leaves),
    "publish": Operation(_publish_first, _publish, _look_at_weights),
    "put": Operation(_make_entries, _put, _look_at_entries),
    "checkpoint": Operation(_make_for_checkpoint, _checkpoint, _look_at_place),
    "move": Operation(_make_movable, _move, _look_at_moved),
}


def act(say: Callable[..., None], operation: str, address: str, transport: str, name: str, setting: str) -> None:
    """Carries an operation out; says ``done``, or the name of the error with which it failed."""
    failpoints.arm(setting)
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        try:
            OPERATIONS[operation].act(client, name)
        except tdserve.TDServeError as error:
            say(type(error).__name__)
        else:
            say("done")
