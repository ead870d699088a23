"""Rows that differ in shape, against a live server: whatever goes in comes back equal in type, structure and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack, set_list_to_stack

import tdserve
from tests.errors import raises
from tests.ragged import CASES, check_same, jagged, rows, split_turns, strided, turns
from tests.sameness import assert_same

pytestmark = pytest.mark.integration


def is_sliceable(case: str) -> bool:
    """Whether tensordict itself indexes such rows, so that a store can have them as rows."""
    return not case.startswith("strided") and "two batch" not in case and "no rows" not in case


@pytest.mark.parametrize("case", CASES)
def test_init_remote_when_rows_differ_then_they_come_back_equal(client: tdserve.Client, name: str, case: str) -> None:
    td = CASES[case]
    client.init_remote(td, name)
    check_same(td, client.from_remote_init(name))
    client.send(td, name)
    out = td.clone()
    client.recv(out, name)
    check_same(td, out)
    assert set(td.keys(True, True)) - {"t"} <= set(client.keys(name, True, True)) or "dtypes" in case


@pytest.mark.parametrize("case", [case for case, td in CASES.items() if td.batch_size and is_sliceable(case)])
def test_handle_when_rows_differ_then_it_reads_and_writes_them(client: tdserve.Client, name: str, case: str) -> None:
    td = CASES[case]
    store = client.memmap(td, name)
    last = td.batch_size[0] - 1
    check_same(td[0], store[0])
    check_same(td[: last + 1], store[: last + 1])
    store[0] = td[last]
    check_same(td[last], store[0])
    store[0:1] = td[0:1]
    check_same(td, store.to_tensordict())


@pytest.mark.parametrize("call", ["memmap", "init_remote", "memmap_like"])
def test_create_when_the_existing_store_is_less_durable_than_asked_then_refused(
    client: tdserve.Client, name: str, call: str
) -> None:
    td = TensorDict({"x": torch.zeros(3)}, [3])
    create: Any = {
        "memmap": client.memmap,
        "init_remote": client.init_remote,
        "memmap_like": client.memmap_like,
    }[call]
    create(td, name)
    with pytest.raises(tdserve.StoreExistsError, match="durability is 'process', asked is 'disk'"):
        create(td + 1, name, exists_ok=True, durability="disk")
    assert torch.equal(client.from_remote_init(name)["x"], td["x"])
    create(td, name, exists_ok=True, durability="process")


def test_send_when_lengths_are_others_then_they_come(client: tdserve.Client, name: str) -> None:
    client.init_remote(TensorDict({"t": jagged([3, 3]), "h": lazy_stack([turns(2), turns(2)])}, [2]), name)
    other = TensorDict({"t": jagged([1, 0]), "h": lazy_stack([turns(1), turns(4)])}, [2])
    with pytest.raises(tdserve.SpecMismatchError):
        client.send(other, name)  # of equal batch sizes nobody knew that they may differ
    client.delete(name)
    client.init_remote(other, name)
    client.send(TensorDict({"t": jagged([3, 3]), "h": lazy_stack([turns(2), turns(2)])}, [2]), name)
    assert client.from_remote_init(name)["h"].batch_size == torch.Size([2, 2])


def flat_row() -> TensorDict:
    return TensorDict(
        {"t": torch.zeros(4, dtype=torch.int64), "s": "x", "d": NonTensorData({"a": 1}), "r": torch.zeros(2)}
    )


def flat_batch() -> TensorDict:
    calls = NonTensorStack(*[NonTensorData(value) for value in ({"a": 1}, {"b": [1, {"c": None}]}, {})])
    return TensorDict(
        {"t": jagged([3, 0, 5]), "s": NonTensorStack("a", "b", "c"), "d": calls, "r": torch.rand(3, 2)}, [3]
    )


def test_replay_when_a_key_is_declared_then_any_form_goes_in_and_jagged_comes_out(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, flat_row(), 50, ragged=["t"])
    batch = flat_batch()
    index = replay.extend(batch)
    check_same(batch, replay[index])
    check_same(batch[1], replay[1])
    dense = batch.clone().set("t", torch.arange(12).view(3, 4))
    found = replay[replay.extend(dense)]
    assert found["t"].layout is torch.jagged
    assert [part.tolist() for part in found["t"].unbind()] == dense["t"].tolist()
    stack = lazy_stack(list(batch.unbind(0)))
    check_same(batch, replay[replay.extend(stack)])
    with replay.writer(batch=2) as writer:
        for row in batch.unbind(0):
            writer.append(row)
    check_same(batch, replay[len(replay) - 3 :])
    replay.set_at_("t", jagged([9, 1]), index[:2])
    assert [len(part) for part in replay[index]["t"].unbind()] == [9, 1, 5]
    with pytest.raises(tdserve.SpecMismatchError, match=r"'t': expected ragged int64\[3, -1\], got"):
        replay.extend(batch.clone().set("t", torch.rand(3, 4)))


def test_set_at_when_rows_describe_themselves_then_a_table_keeps_their_content_only(
    client: tdserve.Client, name: str
) -> None:
    def made(**entries: Any) -> TensorDict:
        members = [TensorDict({"x": torch.rand(2, 1)}, [2]), TensorDict({"y": torch.rand(2, 1), **entries}, [2])]
        stack: Any = LazyStackedTensorDict(*members, stack_dim=1)
        return TensorDict({"s": stack}, [2])

    replay = client.create_replay(name, made()[0], 4)
    index = replay.extend(made())
    given = made(y=torch.nn.Parameter(torch.rand(2, 1)))
    replay.set_at_("s", given["s"], index)
    for row, number in enumerate(index.tolist()):
        found = replay[number]["s"][1]["y"]
        assert (type(found), found.requires_grad) == (torch.Tensor, False)
        assert torch.equal(found, given["s"].tensordicts[1]["y"][row])


def test_sample_when_rows_differ_then_each_is_the_row_it_was(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, flat_row(), 50, ragged=["t"])
    batch = flat_batch()
    replay.extend(batch)
    sampled = replay.sample(40)
    assert sampled["t"].layout is torch.jagged
    for row, number in zip(sampled.unbind(0), sampled["index"].tolist(), strict=True):
        check_same(batch[number], row.exclude("index", "generation"))
    for _, some in zip(range(4), replay.batches(2), strict=False):
        check_same(batch[int(some["index"][0])]["t"], some[0]["t"])


def test_replay_when_two_dimensions_differ_then_lazy_stacks_come_out(client: tdserve.Client, name: str) -> None:
    row = TensorDict({"x": torch.zeros(2, 3, 4), "n": {"y": torch.zeros(5)}, "r": torch.zeros(())})
    replay = client.create_replay(name, row, 20, ragged={"x": (0, 2), ("n", "y"): 0})
    made = [
        TensorDict({"x": torch.rand(size, 3, size + 1), "n": TensorDict({"y": torch.rand(size)}), "r": torch.rand(())})
        for size in (1, 2, 0)
    ]
    batch = lazy_stack(made)
    check_same(batch, replay[replay.extend(batch)])
    equal = lazy_stack([made[0], made[0].clone()])
    check_same(equal, replay[replay.extend(equal)])
    sampled = replay.sample(40)
    assert sampled["index"].shape == (40,)
    rows_of = [*made, made[0], made[0]]
    for row, number in zip(sampled.unbind(0), sampled["index"].tolist(), strict=True):
        check_same(rows_of[number], row.exclude("index", "generation"))


def test_replay_when_histories_differ_in_turns_then_they_come_back_equal(client: tdserve.Client, name: str) -> None:
    made = [
        turns(2),
        turns(3, tool_calls=[{"f": number} for number in range(3)]),
        split_turns({"g": 1}, None, None),
        turns(1),
    ]
    row = TensorDict({"h": made[0], "r": torch.zeros(())})
    replay = client.create_replay(name, row, 20, ragged=["h"])
    batch = TensorDict({"h": lazy_stack(made), "r": torch.rand(4)}, [4])
    check_same(batch, replay[replay.extend(batch)])
    with replay.writer(batch=3) as writer:
        for history in made:
            writer.append(TensorDict({"h": history, "r": torch.ones(())}))
    check_same(made[2], replay[6]["h"])
    with pytest.raises(tdserve.NotSupportedError, match="write h"):
        replay.set_at_(("h", "role"), ["x"], [0])
    with raises(tdserve.SpecMismatchError, key="h"):
        replay.extend(TensorDict({"h": lazy_stack(rows(1, 2)), "r": torch.rand(2)}, [2]))


@pytest.mark.parametrize("is_stack", [False, True])
def test_replay_when_histories_lie_beside_dense_leaves_then_these_are_written_alone(
    client: tdserve.Client, name: str, is_stack: bool
) -> None:
    histories = [turns(size) for size in (3, 1, 2)]
    whole = [TensorDict({"said": each, "score": torch.tensor(0.0)}, []) for each in histories]
    batch = lazy_stack(whole) if is_stack else TensorDict({"said": lazy_stack(histories), "score": torch.zeros(3)}, [3])
    replay = client.create_replay(name, like=whole[0], capacity=8, ragged=["said"])
    index = replay.extend(batch)
    replay.set_at_("score", torch.tensor([1.0, 2.0, 3.0]), index)
    found = replay.sample(16)
    for number, score, said_there in zip(found["index"], found["score"], found["said"].unbind(0), strict=True):
        assert score == number + 1
        check_same(histories[int(number)], said_there)


def test_replay_when_the_row_itself_is_a_history_then_samples_have_their_row_numbers(
    client: tdserve.Client, name: str
) -> None:
    batch = lazy_stack([turns(2), turns(1), turns(3)])
    replay = client.create_replay(name, turns(2), 20, ragged=[()])
    check_same(batch, replay[replay.extend(batch)])
    sampled = replay.sample(5)
    for row, number in zip(sampled.unbind(0), sampled["index"].tolist(), strict=True):
        check_same(batch[number]._tensordict, row)


def test_table_when_the_row_itself_is_a_history_then_rows_are_appended_changed_and_taken(
    client: tdserve.Client, name: str
) -> None:
    made = [turns(2), turns(1), turns(3)]
    replay = client.create_replay(name, made[0], 20, sampler=tdserve.Prioritized(), ragged=[()])
    with replay.writer(batch=2) as writer:
        for history in made:
            writer.append(history)
    check_same(lazy_stack(made), replay[:])
    sampled = replay.sample(5)
    assert replay.update_priority(sampled[:2], 2.0) == 0
    replay.delete(sampled)
    queue = client.create_queue(f"{name}.todo", made[0], 20)
    queue.extend(lazy_stack(made))
    with queue.take(2) as taken:
        check_same(made[1]._tensordict, taken[1])
    assert len(queue) == 1


def test_replay_when_like_is_nested_then_it_declares_itself(client: tdserve.Client, name: str) -> None:
    row = TensorDict({"t": jagged([4], (2,)), "u": strided((1, 2)), "r": torch.zeros(1)}, [])
    replay = client.create_replay(name, row, 10)
    batch = TensorDict({"t": jagged([4, 2], (2,)), "u": strided((1, 2), (3, 3)), "r": torch.rand(2, 1)}, [2])
    check_same(batch, replay[replay.extend(batch)])


def test_replay_when_rows_are_stacked_along_another_dimension_then_they_are_rows(
    client: tdserve.Client, name: str
) -> None:
    agents = [TensorDict({"obs": torch.full((4, size), float(size))}, [4]) for size in (1, 1, 1)]
    batch = lazy_stack(agents, 1)
    replay = client.create_replay(name, like=batch[0], capacity=8)
    assert replay.extend(batch).tolist() == [0, 1, 2, 3]
    for found, expected in zip(replay[0:4].unbind(0), batch.unbind(0), strict=True):
        assert_same(found, expected)


def test_queue_when_rows_differ_then_each_is_taken_once(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, flat_row(), 10, ragged=["t"])
    batch = flat_batch()
    queue.extend(batch)
    with queue.take(3) as taken:
        check_same(batch, taken.exclude("index", "generation", "priority"))


def test_memmap_like_when_keys_are_ragged_then_empty_until_written(client: tdserve.Client, name: str) -> None:
    row = TensorDict({"t": torch.zeros(4, dtype=torch.int64), "s": "x", "n": {"k": torch.zeros(3, 3)}})
    store = client.memmap_like(row, name, batch_size=[5], ragged={"t": 0, ("n", "k"): (0, 1)})
    assert [len(part) for part in store["t"].unbind()] == [0] * 5
    one = TensorDict({"t": torch.arange(3), "s": "q", "n": {"k": torch.ones(2, 1)}})
    store[2] = one
    check_same(one, store[2])
    store["t"] = jagged([1, 2, 3, 4, 5])
    store.set_at_("t", [torch.arange(2), torch.arange(8)], slice(3, 5))
    assert [len(part) for part in store["t"].unbind()] == [1, 2, 3, 2, 8]
    store["n", "k"] = [torch.rand(size, size) for size in range(5)]
    store.set_at_(("n", "k"), torch.rand(1, 7), 0)
    assert [tuple(part["k"].shape) for part in store["n"].unbind(0)] == [(1, 7), (1, 1), (2, 2), (3, 3), (4, 4)]
    with pytest.raises(tdserve.SpecMismatchError, match=r"expected ragged int64\[-1\], got float32\[3\]"):
        store.set_at_("t", torch.rand(3), 0)
    assert store.keys(True, True) == ["t", ("n", "k")]
    assert {"key": "t", "type": "int64", "shape": [5, -1], "nbytes": None} in client.describe(name).as_dict()["spec"][
        "keys"
    ]


def test_reads_when_padded_then_dense_with_masks(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"t": jagged([1, 3]), "n": TensorDict({"u": jagged([2, 0], (2,))}, [2])}, [2])
    store = client.memmap(td, name)
    found = client.from_remote_init(name, pad=7)
    assert found["t"][0, 1:].tolist() == [7, 7]
    assert found["masks", "t"].tolist() == [[True, False, False], [True] * 3]
    assert found["masks", "n", "u"].tolist() == [[True, True], [False, False]]
    assert store.get("t", pad=0).shape == (2, 3)
    assert store.get_at(("n", "u"), [0], pad=0).shape == (1, 2, 2)


def test_publish_when_weights_are_ragged_then_they_come_back_equal(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"t": jagged([1, 3]), "w": torch.rand(2, 3)}, [2])
    client.publish(name, td)
    latest = client.latest(name)
    assert latest is not None
    check_same(td, latest.data)


def test_rows_when_a_leaf_comes_later_then_it_is_there(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, flat_row(), 50, ragged=["t"])
    batch = flat_batch()
    index = replay.extend(batch.exclude("t"))
    assert [len(part) for part in replay.sample(3, require=())["t"].unbind()] == [0, 0, 0]
    replay.set_at_("t", batch["t"], index)
    check_same(batch, replay[index])


def test_texts_when_rows_have_different_numbers_then_lists_of_lists(client: tdserve.Client, name: str) -> None:
    with set_list_to_stack(True):
        td = TensorDict({"s": [["a", "b"], ["c"]]}, [2])
        store = client.memmap(td, name)
        store["s"] = [["x"], ["y", "z"]]
        assert store["s"] == [["x"], ["y", "z"]]


def _leaf(*keys: str) -> TensorDict:
    return TensorDict({key: torch.rand(3) for key in keys})


DEEP: dict[str, Any] = {
    "of one structure": lambda: lazy_stack([lazy_stack([_leaf("a"), _leaf("a")]) for _ in range(2)]),
    "of other keys": lambda: lazy_stack([lazy_stack([_leaf("a"), _leaf("a", "b")]) for _ in range(2)]),
    "of other sizes": lambda: lazy_stack([lazy_stack([_leaf("a")] * size) for size in (2, 3)]),
    "three deep": lambda: lazy_stack([lazy_stack([lazy_stack([_leaf("a")] * 2)] * 2) for _ in range(2)]),
    "a flat one of other keys": lambda: lazy_stack([_leaf("a"), _leaf("b")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DEEP)
def test_rows_when_each_is_a_lazy_stack_of_lazy_stacks_then_come_back_as_they_went_in(
    client: tdserve.Client, name: str, case: str
) -> None:
    rows = [DEEP[case]() for _ in range(4)]
    table = client.create_replay(name, like=rows[0], capacity=8)
    index = table.extend(lazy_stack(rows[:3]))
    with table.writer() as writer:
        writer.append(rows[3])
    found = [*table[index].unbind(0), table[3]]
    for number in range(4):
        assert_same(found[number], rows[number])
    drawn = table.sample(4)
    for at, number in enumerate(drawn["index"].tolist()):
        assert_same(drawn[at].exclude("index", "generation"), rows[number])
