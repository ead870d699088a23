"""Leaves of dtypes that NumPy lacks are read as arrays and written back; other values are not rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import SpecMismatchError

pytestmark = pytest.mark.integration

CONTENT = torch.tensor([[0.1, -3.5, float("inf")], [1e-30, float("nan"), 2.0]])
ROUNDED = np.full((2, 3), 0.1, np.float32)


@pytest.fixture(scope="module", params=["gloo", "shm"])
def arrays(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that hands over arrays, over each transport."""
    with server.client(transport=request.param, timeout_s=20.0, numpy=True) as connected:
        yield connected


@pytest.fixture
def client(arrays: tdserve.Client) -> tdserve.Client:
    """The client after whose tests stores are deleted."""
    return arrays


def make_rows(dtype: torch.dtype) -> TensorDict:
    return TensorDict({"x": CONTENT.to(dtype), "n": {"y": CONTENT.flip(0).to(dtype)}}, [2])


def check_refused(write: Callable[[], Any]) -> None:
    with pytest.raises(SpecMismatchError, match=r"'x'.* bfloat16.* float32.*torch\.from_numpy\(array\)\.to\(torch"):
        write()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_table_when_rows_that_were_read_are_written_back_then_the_same(
    arrays: tdserve.Client, name: str, dtype: torch.dtype
) -> None:
    rows = make_rows(dtype)
    table = arrays.create_replay(name, like=rows[0], capacity=10)
    table.extend(rows)
    found = table[:]
    table.extend(found)
    table.extend([{"x": x, "n": {"y": y}} for x, y in zip(found["x"], found["n"]["y"], strict=True)])
    table.extend({"x": found["x"][0], "n": {"y": found["n"]["y"][0]}})
    with table.writer() as writer:
        writer.append({"x": found["x"][1], "n": {"y": found["n"]["y"][1]}})
    assert np.array_equal(table[:]["x"], np.tile(found["x"], (4, 1)), equal_nan=True)
    table.set_at_("x", found["x"][::-1], [0, 1])
    table.set_at_(("n", "y"), found["n"]["y"][::-1], [0, 1])
    assert np.array_equal(table[[0, 1]]["n"]["y"], found["x"], equal_nan=True)
    same = table.get_with_generations([0, 1])[1]
    assert table.update_if_present([0, 1], {"x": found["x"]}, generation=same).all()
    assert np.array_equal(table[[0, 1]]["x"], found["x"], equal_nan=True)


def test_table_when_values_would_be_rounded_then_refused_by_what_to_do(arrays: tdserve.Client, name: str) -> None:
    rows = make_rows(torch.bfloat16)
    table = arrays.create_replay(name, like=rows[0], capacity=10)
    table.extend(rows)
    found = table[:]
    check_refused(lambda: table.extend({**found, "x": ROUNDED}))
    check_refused(lambda: table.set_at_("x", ROUNDED, [0, 1]))
    check_refused(lambda: table.set_at_("x", torch.ones(2, 3), [0, 1]))  # a tensor could have the dtype
    table.set_at_("x", torch.from_numpy(ROUNDED).to(torch.bfloat16), [0, 1])
    table.extend({**found, "x": ROUNDED.tolist()})
    assert len(np.unique(table.get_at("x", [0, 3]))) == 1


def test_table_when_ragged_rows_are_written_back_then_the_same(arrays: tdserve.Client, name: str) -> None:
    rows = lazy_stack([TensorDict({"x": CONTENT[0, :size].bfloat16()}) for size in (1, 3)])
    table = arrays.create_replay(name, like=rows[1], capacity=10, ragged=["x"])
    table.extend(rows)
    found = table[:]
    table.extend(found)
    table.extend({"x": found["x"][1]})
    table.set_at_("x", found["x"][::-1], [0, 1])
    sizes = [x.tolist() for x in found["x"]]
    assert [x.tolist() for x in table[:]["x"]] == [sizes[1], sizes[0], *sizes, sizes[1]]
    with pytest.raises(SpecMismatchError, match=r"'x'.*ragged bfloat16"):
        table.extend({"x": [ROUNDED[0]]})
    with pytest.raises(SpecMismatchError, match=r"'x'.*ragged bfloat16"):
        table.set_at_("x", [ROUNDED[0]], [0])


def test_stores_when_what_was_read_is_written_back_then_the_same(arrays: tdserve.Client, name: str) -> None:
    arrays.init_remote(make_rows(torch.bfloat16), name)
    store = arrays[name]
    found = store[...]
    store["x"] = found["x"]
    store[0] = {"x": found["x"][0]}
    store.set_("x", found["x"])
    store.set("x", found["x"])
    store.update_(found)
    store.update_at_({"x": found["x"][:1]}, slice(0, 1))
    assert np.array_equal(store["x"], found["x"], equal_nan=True)
    assert arrays.from_remote_init(name, numpy=False)["x"].dtype == torch.bfloat16
    check_refused(lambda: store.set_("x", ROUNDED))
    check_refused(lambda: store.update_({"x": ROUNDED}))


def test_keyed_store_when_entries_are_written_back_then_the_same(arrays: tdserve.Client, name: str) -> None:
    entries = arrays.create_kv(name, like=make_rows(torch.bfloat16)[0])
    entries.put("a", make_rows(torch.bfloat16)[0])
    found = entries["a"]
    entries["b"] = found
    entries.put(["c", "d"], {"x": np.stack([found["x"]] * 2), "n": {"y": np.stack([found["n"]["y"]] * 2)}})
    assert np.array_equal(entries["d"]["x"], found["x"], equal_nan=True)
    check_refused(lambda: entries.put("e", {**found, "x": ROUNDED[0]}))
    tensors = arrays.create_kv(f"{name}-tensors", like=CONTENT[0].bfloat16())
    tensors["a"] = CONTENT[0].bfloat16()
    tensors["b"] = tensors["a"]
    assert np.array_equal(tensors["b"], tensors["a"])
    with pytest.raises(SpecMismatchError, match="bfloat16"):
        tensors["c"] = ROUNDED[0]
