"""Tables that were made like a row of fixed sizes, and whose first rows differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.client.tables.retype_table import find_current_description, retype, was_densified
from tdserve.structure.captures.capture import capture
from tests.ragged import check_same, jagged, rows, split_turns, strided, turns

BATCHES: dict[str, Any] = {
    "jagged": TensorDict({"t": jagged([3, 5, 1]), "r": torch.rand(3)}, [3]),
    "nested key": TensorDict({"n": {"t": jagged([3, 5], (2,))}, "r": torch.rand(2)}, [2]),
    "strided": TensorDict({"t": strided((3, 2), (1, 4)), "r": torch.rand(2)}, [2]),
    "stack": lazy_stack(rows(3, 1, 4)),
    "histories": TensorDict({"h": lazy_stack([turns(2), turns(3)]), "r": torch.rand(2)}, [2]),
    "stacks in rows with a batch of their own": TensorDict(
        {"h": lazy_stack([lazy_stack(rows(1, 2)), lazy_stack(rows(3, 4))]), "r": torch.rand(2, 2)}, [2, 2]
    ),
    "histories of each step": TensorDict(
        {"h": lazy_stack([lazy_stack([turns(1), turns(2)]), lazy_stack([turns(3), turns(1)])]), "r": torch.rand(2, 2)},
        [2, 2],
    ),
    "single turns": TensorDict(
        {"h": lazy_stack([split_turns({"f": 1}, None), split_turns(None)]), "r": torch.rand(2)}, [2]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BATCHES)
def test_extend_when_first_rows_differ_from_like_then_they_come_back_equal(
    client: tdserve.Client, name: str, case: str
) -> None:
    batch = BATCHES[case]
    replay = client.create_replay(name, batch[0], 10)
    other = client.replay(name)  # knows the structure of like
    check_same(batch, replay[replay.extend(batch)])
    sampled = other.sample(4)
    for row, number in zip(sampled.unbind(0), sampled["index"].tolist(), strict=True):
        check_same(batch[number], row.exclude("index", "generation"))
    check_same(batch, other[other.extend(batch)])


ONE_LENGTH: dict[str, Any] = {
    "jagged": (jagged([4, 4]), jagged([2, 5])),
    "one row": (jagged([4]), jagged([5])),
    "no content": (jagged([0, 0]), jagged([0, 5])),
    "strided": (strided((4,), (4,)), strided((2,), (5,))),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_LENGTH)
def test_extend_when_first_nested_rows_are_all_as_long_as_like_then_nested_and_others_fit(
    client: tdserve.Client, name: str, case: str
) -> None:
    first, second = (TensorDict({"t": tokens}, [tokens.size(0)]) for tokens in ONE_LENGTH[case])
    replay = client.create_replay(name, first[0], 10)
    check_same(first["t"], replay[replay.extend(first)]["t"])
    check_same(second["t"], replay[replay.extend(second)]["t"])


def test_create_replay_when_table_was_made_anew_then_exists_ok_finds_it(client: tdserve.Client, name: str) -> None:
    batch = BATCHES["jagged"]
    client.create_replay(name, batch[0], 10).extend(batch)
    assert len(client.create_replay(name, batch[0], 10, exists_ok=True)) == 3
    with pytest.raises(tdserve.StoreExistsError, match="capacity"):
        client.create_replay(name, batch[0], 11, exists_ok=True)
    with pytest.raises(tdserve.StoreExistsError, match="durability is 'process', asked is 'disk'"):
        client.create_replay(name, batch[0], 10, exists_ok=True, durability="disk")
    with pytest.raises(tdserve.StoreExistsError, match="max_object_bytes"):
        client.create_replay(name, batch[0], 10, exists_ok=True, max_object_bytes=1 << 20)
    with pytest.raises(tdserve.StoreExistsError, match="is a replay store, asked is a queue"):
        client.create_queue(name, batch[0], 10, exists_ok=True)
    with pytest.raises(tdserve.StoreExistsError):
        client.create_replay(name, batch[0].exclude("r"), 10, exists_ok=True)


def test_extend_when_rows_were_written_then_refused_and_they_stay(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, TensorDict({"t": torch.zeros(3)}), 10)
    replay.extend(TensorDict({"t": torch.ones(2, 3)}, [2]))
    with pytest.raises(tdserve.SpecMismatchError, match=r"'t'.*ragged"):
        replay.extend(TensorDict({"t": jagged([1, 2], (), torch.float32)}, [2]))
    with pytest.raises(tdserve.SpecMismatchError):
        client.replay(name).extend(TensorDict({"t": jagged([1, 2], (), torch.float32)}, [2]))
    assert replay[:]["t"].tolist() == [[1.0] * 3] * 2


def test_extend_when_more_than_sizes_differs_then_refused(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, TensorDict({"t": torch.zeros(3)}), 10)
    with pytest.raises(tdserve.SpecMismatchError):
        replay.extend(TensorDict({"t": jagged([1, 2])}, [2]))
    assert client.describe(name).spec == replay.spec


def test_take_when_queue_was_made_anew_then_rows_come(client: tdserve.Client, name: str) -> None:
    batch = BATCHES["jagged"]
    queue = client.create_queue(name, batch[0], 10)
    other = client.queue(name)
    queue.extend(batch)
    with other.take(3) as taken:
        check_same(batch["t"], taken["t"])


def test_retype_when_another_client_was_quicker_then_the_table_as_it_is(client: tdserve.Client, name: str) -> None:
    batch = BATCHES["jagged"]
    row = client.create_replay(name, batch[0], 10).spec
    assert find_current_description(client, name, row, client.make_deadline(None), kind="replay") is None
    first = retype(client, name, row, batch, client.make_deadline(None), kind="replay")
    assert first is not None
    again = retype(client, name, row, batch, client.make_deadline(None), kind="replay")
    assert again is not None
    assert again.uid == first.uid
    assert retype(client, name, first.spec, batch, client.make_deadline(None), kind="replay") is None


def test_makes_dense_when_a_nested_tensor_is_taken_for_a_dense_leaf_then_true() -> None:
    row = TensorDict({"t": torch.zeros(4, dtype=torch.int64)})
    nested, dense = TensorDict({"t": jagged([4, 4])}, [2]), row.expand(2).clone()
    assert was_densified(nested, capture(nested, like=capture(dense).spec).spec)
    assert not was_densified(nested, capture(nested).spec)
    assert not was_densified(dense, capture(dense).spec)


def test_find_current_description_when_table_is_gone_then_store_not_found(client: tdserve.Client, name: str) -> None:
    row = client.create_replay(name, TensorDict({"t": torch.zeros(3)}), 10).spec
    client.delete(name)
    with pytest.raises(tdserve.StoreNotFoundError):
        find_current_description(client, name, row, client.make_deadline(None), kind="replay")
