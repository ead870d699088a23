"""Any tensordict that is written in any way is read in any way bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.structure.tensors.torch_types import TO_TORCH
from tests.sameness import difference
from tests.tensordict_strategies import ODD, RESERVED, Inner, Outer, tensordicts

# torch warns once per process when the first complex32 tensor is made
pytestmark = [
    pytest.mark.integration,
]

INLINE, GLOO = 3, 20_000
"""Rows of ``everything``: sent inline, and over the channel."""


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of any dtype with random bits, including NaNs of all kinds."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def everything(num_rows: int) -> TensorDict:
    """Returns leaves of all kinds: nested, of odd sizes, empty, with one value or one per row."""
    batch = [num_rows]
    inner = TensorDict({"deep": torch.randn(num_rows, 2, 3), "v": "inner"}, [num_rows, 2], names=["time", "agent"])
    record = Outer(x=torch.randn(num_rows), y=torch.randn(num_rows, 2), note="noted", batch_size=batch, names=["time"])
    td = TensorDict(
        {
            "obs": torch.randn(num_rows, 2),
            "half": bits(torch.bfloat16, num_rows),
            "flag": torch.arange(num_rows) % 2 == 0,
            "none": torch.empty(num_rows, 0),
            "next": inner,
            "record": record,
            "a/b": {"c.d": torch.arange(num_rows), "": torch.ones(num_rows, 1, dtype=torch.int8)},
            "text": "one for all",
        },
        batch,
        names=["time"],
        device="cpu",
    )
    td.set_non_tensor("array", np.arange(6).reshape(2, 3))
    return td


def zeros_like(td: Any) -> Any:
    """Returns a destination of the same structure with other content."""
    return td.apply(torch.zeros_like)


@pytest.fixture
def stored(client: tdserve.Client, name: str, num_rows: int) -> TensorDict:
    """Returns a tensordict that is stored under ``name``."""
    td = everything(num_rows)
    client.init_remote(td, name)
    return td


both_sizes = pytest.mark.parametrize("num_rows", [INLINE, GLOO])


@both_sizes
def test_init_remote_when_read_back_then_is_equal(client: tdserve.Client, name: str, stored: TensorDict) -> None:
    assert difference(stored, client.from_remote_init(name)) is None
    assert difference(stored, client.load_memmap(name)) is None


@both_sizes
def test_init_remote_when_listed_then_keys_are_tensordicts_own(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    for flags in itertools.product([False, True], repeat=3):
        nested, leaves, sort = flags
        assert client.keys(name, nested, leaves, sort=sort) == list(stored.keys(nested, leaves, sort=sort)), flags


@both_sizes
def test_from_remote_init_when_keys_are_given_then_brings_only_those(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    found = client.from_remote_init(name, keys=["obs", ("next", "deep"), ("a/b", "")])
    assert difference(stored.select("obs", ("next", "deep"), ("a/b", "")), found) is None
    assert difference(stored.select("record"), client.from_remote_init(name, keys=["record"])) is None


@both_sizes
def test_from_remote_init_when_out_is_given_then_it_is_filled_in_place(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    out = zeros_like(stored)
    place = out["obs"].data_ptr()
    assert client.from_remote_init(name, out=out) is out
    assert difference(stored, out) is None
    assert out["obs"].data_ptr() == place


@both_sizes
def test_from_remote_init_when_device_is_named_then_all_of_it_is_there(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    found = client.from_remote_init(name, device="cpu")
    assert found.device == found["next"].device == torch.device("cpu")
    assert difference(stored.to("cpu"), found) is None


@both_sizes
def test_send_when_received_then_content_is_replaced_whole(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    changed = everything(len(stored))
    changed["text"] = "another"
    version = client.send(changed, name)
    out = zeros_like(stored)
    assert client.recv(out, name) == version
    assert difference(changed, out) is None


@both_sizes
def test_recv_when_nothing_is_newer_then_returns_none_and_touches_nothing(
    client: tdserve.Client, name: str, stored: TensorDict
) -> None:
    version = client.send(stored, name)
    out = zeros_like(stored)
    assert client.recv(out, name, newer_than=version, timeout_s=0) is None
    assert difference(zeros_like(stored), out) is None
    with pytest.raises(tdserve.DeadlineExceededError, match=name):
        client.recv(out, name, newer_than=version, timeout_s=0.05)


@both_sizes
def test_memmap_when_handle_is_read_then_is_equal(client: tdserve.Client, name: str, num_rows: int) -> None:
    td = everything(num_rows)
    store = client.memmap(td, name)
    assert difference(td, store.to_tensordict()) is None


def test_memmap_like_when_batch_size_is_given_then_is_zeros_of_that_many_rows(
    client: tdserve.Client, name: str
) -> None:
    row = TensorDict({"obs": torch.ones(2), "n": TensorDict({"x": torch.ones(3, 4)}, [3]), "t": "s"}, [])
    store = client.memmap_like(row, name, batch_size=[5, 2])
    nested = TensorDict({"x": torch.zeros(5, 2, 3, 4)}, [5, 2, 3])
    zeros = TensorDict({"obs": torch.zeros(5, 2, 2), "n": nested, "t": "s"}, [5, 2])
    assert difference(zeros, store.to_tensordict()) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TO_TORCH)
def test_leaf_when_of_any_dtype_then_keeps_its_bits(client: tdserve.Client, name: str, dtype: str) -> None:
    td = TensorDict({"x": bits(TO_TORCH[dtype], 4, 3), "scalar": {"y": bits(TO_TORCH[dtype], 4)}}, [4])
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    assert difference(td[1:3], client[name][1:3]) is None
    changed = TensorDict({"x": bits(TO_TORCH[dtype], 4, 3), "scalar": {"y": bits(TO_TORCH[dtype], 4)}}, [4])
    indices: list[Any] = [1, slice(0, 2), [3, 0], torch.tensor([False, True, True, False])]
    for index in indices:
        client[name][index] = changed[index]
        assert difference(changed[index], client[name][index]) is None
    client.send(td, name)
    assert difference(td, client.from_remote_init(name)) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TO_TORCH)
@pytest.mark.parametrize("num_rows", [4, 20_000])
def test_rows_when_of_any_dtype_then_a_replay_keeps_their_bits(
    client: tdserve.Client, name: str, dtype: str, num_rows: int
) -> None:
    rows = TensorDict({"x": bits(TO_TORCH[dtype], num_rows, 3), "y": bits(TO_TORCH[dtype], num_rows)}, [num_rows])
    replay = client.create_replay(name, rows[0], num_rows + num_rows // 2)
    replay.extend(rows)
    index = replay.extend(rows)
    assert difference(rows, replay[index]) is None
    found = replay.sample(num_rows)
    assert difference(replay[found["index"]], found.exclude("index", "generation")) is None


def test_leaves_when_all_dtypes_are_large_then_keep_their_bits(client: tdserve.Client, name: str) -> None:
    td = TensorDict({dtype: bits(TO_TORCH[dtype], 1000, 3) for dtype in TO_TORCH}, [1000])
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    assert difference(td[torch.tensor([5, 999, 5])], client[name][[5, 999, 5]]) is None


@pytest.mark.slow
def test_keys_when_odd_or_reserved_then_survive_at_every_level_and_kind(client: tdserve.Client, name: str) -> None:
    inner = {key: torch.full((2,), float(number)) for number, key in enumerate(RESERVED + ODD)}
    td = TensorDict({key: {**inner, "v": {key: "text"}} for key in RESERVED + ODD}, [2])
    td["leaf"] = TensorDict(inner, [2])
    td["long " + "x" * 300] = torch.ones(2)
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    for key in RESERVED + ODD:
        assert torch.equal(client[name]["leaf", key], inner[key])


def test_leaves_when_empty_or_without_dimensions_then_survive(client: tdserve.Client, name: str) -> None:
    leaves = {"scalar": torch.tensor(2.5), "none": torch.empty(0), "wide": torch.empty(3, 0, 2, dtype=torch.uint8)}
    td = TensorDict({**leaves, "empty": TensorDict({}, []), "rows": TensorDict({"x": torch.empty(0, 4)}, [0])}, [])
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None


@pytest.mark.parametrize("td", [TensorDict({}, []), TensorDict({}, [0, 3]), TensorDict({"x": torch.empty(0, 2)}, [0])])
def test_tensordict_when_it_has_no_elements_then_survives(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    client.send(td, name)


@both_sizes
def test_tensorclass_when_it_is_the_root_then_comes_back_as_its_class(
    client: tdserve.Client, name: str, num_rows: int
) -> None:
    inner = Inner(z=torch.randn(num_rows), tag="tagged", batch_size=[num_rows])
    td = Outer(x=torch.randn(num_rows), y=torch.randn(num_rows, 3), note="n", inner=inner, batch_size=[num_rows])
    client.init_remote(td, name)
    found = client.from_remote_init(name)
    assert type(found) is Outer
    assert type(found.inner) is Inner
    assert difference(td, found) is None
    assert difference(td[1:3], client[name][1:3]) is None


VALUES: list[Any] = [
    "text", "", "\ud800", b"raw", True, None, 0, -(2**200), 1.5, float("nan"), [1, [2, "x"]], (1, (2,)),
    {"a": 1, 2: (3,), (4, None): b"k"}, np.arange(4, dtype="<u2").reshape(2, 2), np.array(["a", "bc"]), np.float32(2.5),
    np.array([b"x\0y"]), np.datetime64("2026-01-01"),
]  # fmt: skip


def test_non_tensors_when_one_for_all_rows_then_keep_type_and_value(client: tdserve.Client, name: str) -> None:
    td = TensorDict({}, [2])
    for number, value in enumerate(VALUES):
        td.set_non_tensor(f"v{number}", value)
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None


def test_non_tensors_when_one_per_row_then_each_row_keeps_its_own(client: tdserve.Client, name: str) -> None:
    td = TensorDict({"v": NonTensorStack(*VALUES), "x": torch.arange(len(VALUES))}, [len(VALUES)])
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    assert difference(td[3:7], client[name][3:7]) is None


def test_non_tensors_when_below_more_batch_dimensions_then_each_element_keeps_its_own(
    client: tdserve.Client, name: str
) -> None:
    texts = [NonTensorStack(*[f"{row}.{part}" for part in range(3)]) for row in range(4)]
    inner = TensorDict({"v": NonTensorStack(*texts), "all": "one"}, [4, 3])
    td = TensorDict({"in": inner, "row": NonTensorStack(*"abcd")}, [4])
    store = client.memmap(td, name)
    assert difference(td, store.to_tensordict()) is None
    assert difference(td[1:3], store[1:3]) is None
    store[0] = td[2]
    td[0] = td[2]
    assert difference(td, store.to_tensordict()) is None
    single = TensorDict({"in": TensorDict({"v": NonTensorStack("x", "y")}, [2])}, [])
    client.init_remote(single, f"{name}-1")
    assert difference(single, client.from_remote_init(f"{name}-1")) is None
    client.delete(f"{name}-1")


def test_struct_array_when_stored_then_strings_and_numbers_survive(client: tdserve.Client, name: str) -> None:
    rows = np.array([("a", 1.5, 1), ("bc", 2.5, 2)], dtype=[("name", "U4"), ("score", "f4"), ("n", "i8")])
    td = TensorDict.from_struct_array(rows).clone()
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None


_numbers = itertools.count()


@pytest.fixture
def fresh_name(client: tdserve.Client) -> Iterator[list[str]]:
    """Yields unused names; their stores are deleted after the test."""
    used: list[str] = []
    yield used
    for each in used:
        if each in client:
            client.delete(each)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensordicts())
def test_any_tensordict_when_it_goes_in_then_it_comes_out_of_store_and_weights(
    client: tdserve.Client, fresh_name: list[str], td: Any
) -> None:
    name = f"any-{next(_numbers)}"
    fresh_name.append(name)
    client.init_remote(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    client.send(td, name)
    assert difference(td, client.from_remote_init(name)) is None
    client.delete(name)
    client.publish(name, td)
    weights = client.latest(name)
    assert weights is not None
    assert difference(td, weights.data) is None
    client.delete(name)
