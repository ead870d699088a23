"""Entries that are read into the caller's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SpecMismatchError

ROW = TensorDict({"a": torch.zeros(3), "n": {"b": torch.tensor(0), "none": torch.zeros(0)}}, [])


def make_rows(width: int, *numbers: int) -> TensorDict:
    """Returns rows that contain their numbers."""
    wide = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, width).clone()
    inner = {"b": torch.tensor(numbers), "none": torch.zeros(len(numbers), 0)}
    return TensorDict({"a": wide, "n": TensorDict(inner, [len(numbers)])}, [len(numbers)])


@pytest.mark.parametrize("width", [3, 4096], ids=["small", "large"])
def test_get_when_out_is_given_then_filled_in_place_and_returned(client: tdserve.Client, name: str, width: int) -> None:
    rows = make_rows(width, 1, 2, 3)
    kv = client.create_kv(name, like=rows[0])
    kv.put(["x", "y", "z"], rows)
    out: Any = make_rows(width, 0, 0)
    pointer = out["a"].data_ptr()
    assert kv.get(["z", "x"], out=out) is out
    assert (out["n", "b"].tolist(), out["a"][:, -1].tolist(), out["a"].data_ptr()) == ([3, 1], [3, 1], pointer)
    one = out[0].clone()
    assert kv.get("y", out=one) is one
    assert (one["n", "b"], one["a"].sum()) == (2, 2 * width)
    strided = TensorDict({"a": torch.zeros(2, width, 2)[..., 0], "n": out["n"].clone()}, [2])
    assert kv.get(["x", "y"], out=strided, numpy=True)["a"][:, 0].tolist() == [1, 2]
    chosen = TensorDict({"a": torch.zeros(2, width)}, [2])
    assert kv.get(["y", "z"], "a", out=chosen)["a"][:, 0].tolist() == [2, 3]
    with torch.inference_mode():
        kept = make_rows(width, 0, 0)
    assert kv.get(["y", "y"], out=kept)["n", "b"].tolist() == [2, 2]
    assert kv.get([], out=out[:0]).batch_size == (0,)


def test_get_when_out_is_a_tensor_then_filled_with_tensors(client: tdserve.Client, name: str) -> None:
    kv = client.create_kv(name, like=torch.zeros(2))
    kv.put(["x", "y"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    out = torch.zeros(2, 2)
    assert kv.get(["y", "x"], out=out) is out
    assert out.tolist() == [[3, 4], [1, 2]]
    assert kv.get("y", out=out[1])[0] == 3
    assert out.tolist() == [[3, 4], [3, 4]]
    for wrong in (torch.zeros(3, 2), torch.zeros(()), torch.zeros(2, 2, dtype=torch.float64), make_rows(2, 1, 2)):
        with pytest.raises(SpecMismatchError):
            kv.get(["x", "y"], out=wrong)


def test_get_when_the_store_has_any_entries_then_out_is_filled_by_one_key(client: tdserve.Client, name: str) -> None:
    kv = client.create_kv(name)
    kv.put(["row", "tensor", "text"], [ROW + 1, torch.ones(4), "a"])
    assert kv.get("row", out=ROW.clone())["a"].tolist() == [1, 1, 1]
    assert kv.get("tensor", out=torch.zeros(4)).tolist() == [1, 1, 1, 1]
    with pytest.raises(InvalidRequestError, match=r"the entry is a str.*read it without out="):
        kv.get("text", out=ROW.clone())
    with pytest.raises(
        InvalidRequestError, match=r"several cannot fill one tensordict: fill one key at a time, or pass like="
    ):
        kv.get(["row", "row"], out=make_rows(3, 0, 0))


def test_get_when_entries_have_values_then_those_of_out_are_replaced(client: tdserve.Client, name: str) -> None:
    kv = client.create_kv(name, like=TensorDict({"x": torch.tensor(0), "text": ""}))
    kv.put(["a", "b"], lazy_stack([TensorDict({"x": torch.tensor(n), "text": f"text {n}"}) for n in (1, 2)]))
    out = TensorDict({"x": torch.zeros(2, dtype=torch.int64), "text": NonTensorStack("", "")}, [2])
    kv.get(["b", "a"], out=out)
    assert (out["x"].tolist(), list(out["text"])) == ([2, 1], ["text 2", "text 1"])


def test_get_when_out_does_not_fit_then_error_and_nothing_is_written(client: tdserve.Client, name: str) -> None:
    kv = client.create_kv(name, like=ROW)
    kv.put(["x", "y"], make_rows(3, 1, 2))
    whole = make_rows(3, 7, 7)
    wrong: list[Any] = [make_rows(4, 7, 7), make_rows(3, 7), whole.exclude("a"), torch.zeros(2)]
    wrong += [whole.clone().set("more", torch.zeros(2)), TensorDict({"a": whole["a"].double(), "n": whole["n"]}, [2])]
    for out in wrong:
        with pytest.raises(SpecMismatchError, match=repr(name)):
            kv.get(["x", "y"], out=out)
    with pytest.raises(InvalidRequestError, match="a dict is no tensordict or tensor"):
        kv.get(["x", "y"], out={"a": whole["a"]})
    with pytest.raises(InvalidRequestError, match=r"pass it or out="):
        kv.get("x", default=None, out=whole[0])
    with pytest.raises(KeyNotFoundError):
        kv.get(["x", "absent"], out=whole)
    assert whole["n", "b"].tolist() == [7, 7]
    assert all(int(each["n", "b"][0]) == 7 for each in wrong if not isinstance(each, torch.Tensor))
