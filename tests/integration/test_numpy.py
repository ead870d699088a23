"""Every call that takes tensordicts also takes dicts of arrays, and gives them back on request."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises

DTYPES = ["bool", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ROW = {"obs": np.zeros(2, np.float32), "next": {"obs": np.zeros(2, np.float32)}, "action": np.int64(0), "reward": 0.0}


def rows(num_rows: int, *, start: int = 0) -> dict[str, Any]:
    """Rows whose leaves are numbered."""
    number = np.arange(start, start + num_rows)
    obs = number[:, None] + np.zeros((num_rows, 2), np.float32)
    return {
        "obs": obs.astype(np.float32),
        "next": {"obs": obs.astype(np.float32) + 1},
        "action": number,
        "reward": number.astype(np.float32),
    }


def same(left: Any, right: Any) -> bool:
    """Whether two results are equal in their types, dtypes, shapes and content."""
    if isinstance(left, dict):
        return type(right) is dict and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray):
        is_alike = type(right) is np.ndarray and left.dtype == right.dtype and left.shape == right.shape
        return is_alike and bool((left == right).all())
    return type(left) is type(right) and bool(left == right)


def keep(found: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The keys of a sample that its rows have."""
    return {key: found[key] for key in like}


@pytest.fixture(scope="module", params=["gloo", "shm"])
def arrays(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that hands over arrays, over each transport."""
    with server.client(transport=request.param, timeout_s=20.0, numpy=True) as connected:
        yield connected


@pytest.fixture
def client(arrays: tdserve.Client) -> tdserve.Client:
    """The client after whose tests stores are deleted."""
    return arrays


@pytest.fixture
def table(arrays: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A table of eight rows."""
    made = arrays.create_replay(name, ROW, 100, sampler=tdserve.Prioritized(alpha=0.6, beta=0.4))
    made.extend(rows(8))
    return made


# ------------------------------------------------------------------------------------------- stores


def test_store_when_of_arrays_of_each_dtype_then_they_come_back(arrays: tdserve.Client, name: str) -> None:
    content = {dtype: np.arange(12).reshape(4, 3).astype(dtype) for dtype in DTYPES}
    content["n"] = {"y": np.arange(4), "deep": {"z": np.arange(4.0)[:, None]}}  # type: ignore[assignment]
    arrays.init_remote(content, name, batch_size=[4])
    assert same(arrays.from_remote_init(name), content)
    assert same(arrays[name][1:3]["n"]["deep"], {"z": np.array([[1.0], [2.0]])})
    assert same(arrays[name]["f8"], content["f8"])


def test_store_when_it_has_values_then_they_stay_what_they_are(arrays: tdserve.Client, name: str) -> None:
    arrays.init_remote({"s": np.array(["a", "b"]), "one": "x", "x": np.zeros(2)}, name, batch_size=2)
    assert same(arrays.from_remote_init(name), {"s": ["a", "b"], "one": "x", "x": np.zeros(2)})
    arrays[name].set_("s", np.array(["c", "d"]))
    assert arrays[name]["s"] == ["c", "d"]


def test_store_when_no_batch_size_is_given_then_it_has_none(arrays: tdserve.Client, name: str) -> None:
    arrays.memmap({"w": np.ones((2, 3))}, name)
    assert arrays[name].batch_size == ()
    with raises(tdserve.InvalidRequestError, argument="batch_size"):
        arrays.init_remote(TensorDict({}, [3]), f"{name}-other", batch_size=[3])


def test_store_when_written_by_dicts_then_as_by_tensordicts(arrays: tdserve.Client, name: str) -> None:
    content = rows(4)
    arrays.init_remote(content, name, batch_size=[4])
    store = arrays[name]
    arrays.send(rows(4, start=5), name)
    assert same(store[...], rows(4, start=5))
    store.update_({"reward": np.arange(4, dtype=np.float32)[::-1], "next": {"obs": np.zeros((4, 2), np.float16)}})
    assert store["reward"].tolist() == [3, 2, 1, 0]
    assert store["next"]["obs"].max() == 0
    store[2] = {"action": 7, "next": {"obs": [1.0, 2.0]}}
    store.update_at_({"action": np.array([1, 2])}, [0, 1])
    assert store["action"].tolist() == [1, 2, 7, 8]
    store.set_at_("obs", np.ones(2, ">f4"), 3)
    store.set_("action", np.broadcast_to(np.int64(3), 4))
    assert (store["obs"][3].tolist(), store["action"].tolist()) == ([1, 1], [3] * 4)
    store.update_(
        {"action": np.zeros(4, int), "next": {"obs": np.ones((4, 2), np.float32)}}, keys_to_update=["next", "no"]
    )
    assert (store["action"].tolist(), store["next"]["obs"].min()) == ([3] * 4, 1)


def test_store_when_dicts_add_keys_then_they_are_there(arrays: tdserve.Client, name: str) -> None:
    arrays.init_remote(rows(4), name, batch_size=[4])
    store = arrays[name]
    store["added"] = np.arange(4)[::-1][::-1]
    store.update({"more": {"x": np.broadcast_to(0.0, 4)}, "names": np.array(list("abcd"))})
    store.set("part", {"z": np.arange(4)[::-1], "text": ["a", "b", "c", "d"]})
    assert store["names"] == store["part"]["text"] == ["a", "b", "c", "d"]
    assert same(store["part"]["z"], np.array([3, 2, 1, 0]))
    assert same(store.get("added"), np.arange(4))
    assert same(store.get_at(("more", "x"), slice(2)), np.zeros(2))


def test_store_when_zeros_are_made_like_a_dict_then_of_its_structure(arrays: tdserve.Client, name: str) -> None:
    handle = arrays.memmap_like(ROW, name, batch_size=3)
    assert same(handle[0], {**ROW, "action": np.array(0), "reward": np.array(0, np.float32)})


def test_store_when_read_row_by_row_or_in_batches_then_arrays(arrays: tdserve.Client, name: str) -> None:
    arrays.init_remote(rows(5), name, batch_size=[5])
    store = arrays[name]
    assert [int(row["action"]) for row in store] == [0, 1, 2, 3, 4]
    assert [int(row["action"]) for row in store.select("action")] == [0, 1, 2, 3, 4]
    with store.batches(2, with_index=True) as batches:
        assert [batch["index"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert same(store.select("next")[:2], {"next": rows(2)["next"]})
    assert isinstance(store.masked_select(torch.tensor([True, False, True, False, False])), TensorDict)


# ------------------------------------------------------------------------------------------- tables


def test_extend_when_of_a_dict_then_its_rows_are_stored(table: tdserve.ReplayHandle) -> None:
    assert same(table[:], rows(8))
    index = table.extend({**rows(1, start=8), "reward": [1.5]}, priority=np.ones(1))
    assert same(index, np.array([8]))
    assert same(table.extend(ROW), np.array([9]))
    assert same(table.extend(ROW, return_early=True).result(), np.array([10]))
    assert same(table.extend([ROW, ROW]), np.array([11, 12]))
    assert float(table[8]["reward"]) == 1.5


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_queue_when_rows_are_strings_then_each_is_a_row(arrays: tdserve.Client, name: str, make: Any) -> None:
    queue = arrays.create_queue(name, like={"prompt": ""}, max_size=9)
    assert same(queue.extend({"prompt": make(["hi", "you"])}), np.arange(2))
    with queue.take(2) as taken:
        assert taken["prompt"] == ["hi", "you"]


def test_extend_when_strings_are_not_as_many_as_rows_then_refused(arrays: tdserve.Client, name: str) -> None:
    table = arrays.create_replay(name, like={"obs": np.zeros(3), "text": ""}, capacity=9)
    with pytest.raises(tdserve.SpecMismatchError, match=f"'{name}', key 'text': expected 3 values, one per row, got 2"):
        table.extend({"obs": np.zeros((3, 3)), "text": np.array(["a", "b"])})
    assert table.info()["num_rows"] == 0
    table.extend({"obs": np.zeros((3, 3)), "text": ("a", "b", "c")})
    assert table[0:3]["text"] == ["a", "b", "c"]


def test_table_when_like_a_date_then_refused_by_what_to_give(arrays: tdserve.Client, name: str) -> None:
    with pytest.raises(tdserve.NotSupportedError, match=rf"key 'x' of store '{name}'.*view\('int64'\)"):
        arrays.create_replay(name, like={"x": np.datetime64("2020-01-01")}, capacity=9)


def test_keyed_store_when_its_entries_are_strings_then_one_per_key(arrays: tdserve.Client, name: str) -> None:
    store = arrays.create_kv(name, like={"text": ""})
    store.put(["a", "b"], {"text": ["hi", "you"]})
    assert store.get(["b", "a"])["text"] == ["you", "hi"]


def test_extend_when_of_several_dimensions_then_flattened(table: tdserve.ReplayHandle) -> None:
    given = rows(6, start=20)
    grid = {key: value.reshape(2, 3, *value.shape[1:]) for key, value in given.items() if key != "next"}
    grid["next"] = {"obs": given["next"]["obs"].reshape(2, 3, 2)}
    numbers = table.extend(grid, flatten=True)
    assert same(numbers, np.arange(8, 14).reshape(2, 3))
    assert same(table[8:14], given)
    table.set_at_("obs", grid["obs"] + 1, numbers)
    assert same(table[8:14]["obs"], given["obs"] + 1)
    table.set_at_("obs", np.zeros(2, np.float32), numbers)  # broadcast to all
    assert not table[8:14]["obs"].any()


def test_extend_when_of_a_dict_of_tensors_or_other_dtypes_then_converted_where_nothing_is_lost(
    table: tdserve.ReplayHandle,
) -> None:
    given = rows(2)
    index = table.extend({**given, "obs": torch.ones(2, 2), "action": np.array([3, 4], np.uint8)})
    assert table[index]["action"].tolist() == [3, 4]
    with pytest.raises(tdserve.SpecMismatchError, match=r"'reward'.*float64"):
        table.extend({**given, "reward": np.zeros(2)})
    with raises(tdserve.SpecMismatchError, key="obs"):
        table.extend({**given, "obs": np.zeros((2, 3), np.float32)})
    with pytest.raises(tdserve.NotSupportedError, match=r"'obs'.*view"):
        table.extend({**given, "obs": np.zeros((2, 2), "M8[s]")})


def test_writer_when_it_gets_dicts_then_their_rows_are_stored(table: tdserve.ReplayHandle) -> None:
    buffer = np.zeros(2, np.float32)
    with table.writer() as writer:
        for at in range(3):
            buffer[:] = at
            writer.append({"obs": buffer, "next": {"obs": [at, at]}, "action": at, "reward": np.float64(at)})
        with raises(tdserve.SpecMismatchError, key="obs"):
            writer.append({**ROW, "obs": np.zeros(3, np.float32)})
        writer.end_trajectory()
    assert table[8:11]["obs"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert table[8:11]["next"]["obs"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_sample_when_of_arrays_then_its_rows_with_columns_stand_for_them(table: tdserve.ReplayHandle) -> None:
    sample = table.sample(4)
    assert same(keep(sample, ROW), table[sample["index"]])
    assert {key: sample[key].dtype for key in ("index", "priority")} == {"index": np.int64, "priority": np.float32}
    assert table.update_priority(sample, np.full(4, 2.0)) == 0
    assert table.update_priority(sample["index"], [3.0] * 4, generation=sample["generation"]) == 0
    table.set_at_("reward", np.full(4, 5, np.float32), sample)
    assert set(table[sample["index"]]["reward"]) == {5.0}
    assert table.delete(sample) == len(set(sample["index"].tolist()))
    assert table.delete(sample["index"], generation=sample["generation"]) == table.delete(sample) == 0


def test_sample_when_written_to_then_the_table_is_not(table: tdserve.ReplayHandle) -> None:
    sample = table.sample(4)
    sample["obs"][:] = 99  # its own memory
    assert table[:]["obs"].max() == 7


def test_sample_when_the_call_names_the_form_then_of_that(server: tdserve.Server, table: tdserve.ReplayHandle) -> None:
    assert isinstance(table.sample(2, numpy=False), TensorDict)
    with server.client() as plain:
        assert isinstance(plain.replay(table.name).sample(2, numpy=True), dict)
        assert isinstance(plain.replay(table.name).sample(2), TensorDict)
    assert isinstance(table.sample(2, device="cpu"), TensorDict)
    with pytest.raises(tdserve.InvalidRequestError, match="device='cpu'"):
        table.sample(2, numpy=True, device="cpu")


def test_batches_when_of_arrays_then_dicts(table: tdserve.ReplayHandle) -> None:
    with table.batches(4, prefetch=2) as batches:
        assert {next(batches)["obs"].shape for _ in range(4)} == {(4, 2)}
    with table.batches(4, consumer="learner", timeout_s=5.0) as batches:
        assert sorted([*next(batches)["action"], *next(batches)["action"]]) == [*range(8)]


def test_take_when_of_arrays_then_acknowledged_by_them(table: tdserve.ReplayHandle) -> None:
    with table.take(4, consumer="one") as taken:
        assert isinstance(taken["obs"], np.ndarray)
    rest = table.take(4, consumer="one", ack=False)
    table.ack(rest, consumer="one")
    assert {*taken["action"]} | {*rest["action"]} == {*range(8)}


def test_queue_when_of_arrays_then_each_row_is_taken_once(arrays: tdserve.Client, name: str) -> None:
    queue = arrays.create_queue(name, {"prompt": np.zeros(3, np.int64), "text": "a"}, 20)
    queue.extend({"prompt": np.ones((3, 3), int), "text": ["a", "b", "c"]})
    queue.extend([{"prompt": [1, 2, 3], "text": "d"}])
    with queue.take(2) as taken:
        assert (taken["prompt"].shape, taken["text"]) == ((2, 3), ["a", "b"])
    rest = queue.take(1, ack=False)
    queue.ack(rest)
    with queue.batches(1, timeout_s=5.0) as batches:
        assert next(batches)["text"] == ["d"]


def test_table_when_its_rows_differ_in_size_then_lists_of_arrays(arrays: tdserve.Client, name: str) -> None:
    table = arrays.create_replay(name, {"tokens": np.zeros(3, np.int64), "text": "a"}, 20, ragged="tokens")
    table.extend({"tokens": [np.arange(2), np.arange(4)], "text": ["x", "y"]})
    table.extend({"tokens": np.arange(1), "text": "z"})
    with table.writer() as writer:
        writer.append({"tokens": [7, 8, 9], "text": "w"})
    found = table[:]
    assert [row.tolist() for row in found["tokens"]] == [[0, 1], [0, 1, 2, 3], [0], [7, 8, 9]]
    assert found["text"] == ["x", "y", "z", "w"]
    assert [row.tolist() for row in table.get_at("tokens", [1, 2])] == [[0, 1, 2, 3], [0]]
    assert table.get_at(["text"], [1]) == {"text": ["y"]}
    assert table.sample(3, pad=0)["tokens"].ndim == 2


def test_handle_when_pickled_then_its_client_hands_over_arrays(table: tdserve.ReplayHandle) -> None:
    assert isinstance(pickle.loads(pickle.dumps(table)).sample(2), dict)


# ------------------------------------------------------------------------------------------- keyed stores and weights


def test_keyed_store_when_like_a_dict_then_dicts_go_in_and_come_out(arrays: tdserve.Client, name: str) -> None:
    store = arrays.create_kv(name, like={"w": np.zeros(2, np.float32), "n": {"b": 0}})
    store.put("a", {"w": [1, 2], "n": {"b": 5}})
    store.put(["b", "c"], {"w": np.ones((2, 2), np.float32), "n": {"b": np.arange(2)}})
    store["d"] = {"w": np.zeros(2, np.float16), "n": {"b": np.int8(1)}}
    assert same(store.get("a"), {"w": np.array([1, 2], np.float32), "n": {"b": np.array(5)}})
    assert same(store.get(["b", "c"]), {"w": np.ones((2, 2), np.float32), "n": {"b": np.arange(2)}})
    assert same(store.get("a", select=("n", "b")), {"n": {"b": np.array(5)}})
    assert isinstance(store.get("d", numpy=False), TensorDict)
    assert same(store.get_with_versions("d")[0], store.pop("d"))
    with raises(tdserve.SpecMismatchError, key="w"):
        store.put("e", {"w": np.zeros(3, np.float32), "n": {"b": 1}})


def test_keyed_store_when_like_an_array_then_arrays(arrays: tdserve.Client, name: str) -> None:
    store = arrays.create_kv(name, like=np.zeros(3))
    store.put("a", np.arange(3.0)[::-1])
    store.put(["b", "c"], np.ones((2, 3)))
    assert same(store["a"], np.array([2.0, 1.0, 0.0]))
    assert same(store.get(["b", "c"]), np.ones((2, 3)))


def test_keyed_store_when_of_anything_then_dicts_come_back_as_they_went_in(arrays: tdserve.Client, name: str) -> None:
    store = arrays.create_kv(name)
    store.put("arrays", {"x": np.ones(2), "text": "t"})
    store.put("tensors", {"x": torch.ones(2, dtype=torch.bfloat16), "n": {"y": np.zeros(1)}})
    assert same(store.get("arrays"), {"x": np.ones(2), "text": "t"})
    assert same(store.get("tensors"), {"x": np.ones(2, np.float32), "n": {"y": np.zeros(1)}})
    assert isinstance(store.get(["arrays", "tensors"])[1]["x"], np.ndarray)
    with pytest.raises(tdserve.NotSupportedError, match="'y'"):
        store.put("refused", {"x": torch.ones(2), "y": np.ma.masked_array([1])})


def test_weights_when_published_as_a_dict_then_read_as_one(arrays: tdserve.Client, name: str) -> None:
    weights = {"dense": {"kernel": np.ones((2, 3), np.float32), "bias": torch.ones(2, dtype=torch.bfloat16)}}
    expected = {"dense": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(2, np.float32)}}
    assert arrays.publish(name, weights) == 1
    found = arrays.latest(name)
    assert found is not None
    assert same(found.data, expected)
    assert same(arrays.version(name, 1).data, expected)
    with arrays.subscribe(name, timeout_s=5.0) as versions:
        assert same(next(versions).data, expected)
    assert isinstance(arrays.version(name, 1, numpy=False).data, TensorDict)
    out = arrays.version(name, 1, numpy=False).data.clone()
    found = arrays.latest(name, out=out)
    assert found is not None
    assert found.data is out


def test_destination_when_a_dict_then_refused_by_what_to_do(arrays: tdserve.Client, name: str) -> None:
    arrays.init_remote({"x": np.zeros(2)}, name)
    with pytest.raises(tdserve.NotSupportedError, match="numpy=True"):
        arrays.recv({"x": np.zeros(2)}, name)
    with pytest.raises(tdserve.NotSupportedError, match="cannot be locked"):
        arrays.memmap_({"x": np.zeros(2)}, f"{name}-other")
    arrays.memmap({"x": np.zeros(2)}, f"{name}-other", copy_existing=False)
    with pytest.raises(tdserve.InvalidRequestError, match="numpy=True"):
        arrays.latest(name, into={"x": np.zeros(2)})  # type: ignore[arg-type]  # it is the mistake


# ------------------------------------------------------------------------------------------- coroutines, hints


def test_coroutines_when_given_dicts_then_as_the_calls(server: tdserve.Server, name: str) -> None:
    async def run() -> None:
        async with tdserve.aio.connect(server.address, numpy=True) as client:
            table = await client.create_replay(name, like=ROW, capacity=10)
            assert same(await table.extend(rows(3)), np.arange(3))
            assert same(await table[0:3], rows(3))
            assert isinstance((await table.sample(2))["obs"], np.ndarray)

    asyncio.run(run())


def test_extend_when_a_tensordict_lacks_its_batch_size_then_the_error_suggests_it(table: tdserve.ReplayHandle) -> None:
    with pytest.raises(tdserve.SpecMismatchError, match=r"give the tensordict batch_size=\[3\]"):
        table.extend(TensorDict(rows(3)))


def test_extend_when_like_was_a_batch_then_the_error_explains_it(arrays: tdserve.Client, name: str) -> None:
    table = arrays.create_replay(name, like=TensorDict(rows(5), [5]), capacity=10)
    with pytest.raises(tdserve.SpecMismatchError, match=r"like= of the table was a batch \[5\]"):
        table.extend(torch.stack([TensorDict(rows(5), [5])[0]] * 3))
    assert same(table.extend(rows(5)), np.array([0]))


def test_extend_when_rows_of_a_list_differ_then_refused(table: tdserve.ReplayHandle) -> None:
    with pytest.raises(tdserve.TDServeError):
        table.extend([ROW, {**ROW, "obs": np.zeros(3, np.float32)}])
    with pytest.raises(tdserve.NotSupportedError, match=r"torch.stack"):
        table.extend([TensorDict(ROW, []), ROW])
    with pytest.raises(tdserve.NotSupportedError, match="a list of dicts"):
        table.extend((ROW, ROW))
    with pytest.raises(tdserve.NotSupportedError, match="dicts of arrays can be sent"):
        table.extend(np.zeros(3))
    assert same(table.extend([]), np.arange(0))
