"""Lazy stacks as ``out=`` for content that is stored densely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

import tdserve
from tdserve.base.errors import NotSupportedError, SpecMismatchError


def row(number: int = 0) -> TensorDict:
    return TensorDict({"number": torch.tensor(number), "wide": torch.full((4,), float(number))}, [])


def rows(*sizes: int) -> TensorDict:
    """Numbered rows, densely."""
    numbers = 1 + torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return TensorDict({"number": numbers, "wide": numbers[..., None].expand(*sizes, 4).float()}, sizes).contiguous()


def empty(*sizes: int, dim: int = 0) -> Any:
    """A lazy stack, of stacks of these if there are several sizes, of rows that are 0."""
    if not sizes:
        return row()
    others = sizes[:dim] + sizes[dim + 1 :]
    return lazy_stack([empty(*others) for _ in range(sizes[dim])], dim)


DENSE_MEMBERS = lazy_stack([rows(3).zero_(), rows(3).zero_()], 1)

OUTS: dict[str, tuple[Any, TensorDict]] = {
    "rows": (empty(2), rows(2)),
    "one row": (empty(1), rows(1)),
    "a later dimension": (DENSE_MEMBERS, rows(3, 2)),
    "stacks": (empty(2, 3), rows(2, 3)),
    "stacks of a later dimension": (empty(2, 3, dim=1), rows(2, 3)),
    "views": (lazy_stack([*rows(6).zero_()[::3].unbind(0)]), rows(2)),
    "locked": (empty(2).lock_(), rows(2)),
    "below": (TensorDict({"below": empty(2)}, [2]), TensorDict({"below": rows(2)}, [2])),
    "values": (
        lazy_stack([row().set_non_tensor("text", "a"), row().set_non_tensor("text", "b")]),
        rows(2).set("text", NonTensorStack("x", "y")),
    ),
}

SHARED = torch.zeros(7)

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "one row twice": (lazy_stack([row()] * 2), NotSupportedError, "share memory.*stack clones"),
    "overlapping rows": (
        lazy_stack([row().set("wide", SHARED[:4]), row().set("wide", SHARED[3:])]),
        NotSupportedError,
        "share memory.*stack clones",
    ),
    "other keys": (lazy_stack([row(), row().exclude("wide")]), SpecMismatchError, "give a stack of equal rows"),
    "another size": (empty(3), SpecMismatchError, "batch size"),
    "another value": (lazy_stack([row(), row().set("wide", torch.zeros(3))]), SpecMismatchError, "wide"),
}

Read = Callable[[tdserve.Client, str, TensorDict, Any], Any]


def read_version(client: tdserve.Client, name: str, content: TensorDict, out: Any) -> Any:
    client.publish(name, content)
    found = client.latest(name, out=out)
    assert found is not None
    return found.data


def read_store(client: tdserve.Client, name: str, content: TensorDict, out: Any) -> Any:
    client.init_remote(content, name)
    return client.load_memmap(name, out=out)


def receive_store(client: tdserve.Client, name: str, content: TensorDict, out: Any) -> Any:
    client.init_remote(content, name)
    client.recv(out, name)
    return out


def read_entries(client: tdserve.Client, name: str, content: TensorDict, out: Any) -> Any:
    entries = client.create_kv(name, like=content[0])
    keys = [str(number) for number in range(len(content))]
    entries.put(keys, content)
    return entries.get(keys, out=out)


READS = [read_version, read_store, receive_store, read_entries]


def list_members(td: Any) -> list[Any]:
    return [member for each in td.tensordicts for member in list_members(each)] if hasattr(td, "tensordicts") else [td]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("case", OUTS)
def test_out_when_a_lazy_stack_then_its_members_tensors_are_filled(
    client: tdserve.Client, name: str, read: Read, case: str
) -> None:
    out, content = OUTS[case]
    out = out.clone()
    out = out.lock_() if case == "locked" else out
    tensors = [member["number"] for member in list_members(out.get("below", out))]
    assert read(client, name, content, out) is out
    for key in content.keys(include_nested=True, leaves_only=True):
        assert torch.equal(out.get(key), content.get(key)) or case == "values"
    if case == "values":
        assert [member["text"] for member in out.tensordicts] == ["x", "y"]
    held = [member["number"] for member in list_members(out.get("below", out))]
    assert all(mine is before for mine, before in zip(held, tensors, strict=True))


@pytest.mark.parametrize("read", [read_version, receive_store, read_entries])
@pytest.mark.parametrize("case", REFUSED)
def test_out_when_a_lazy_stack_cannot_hold_the_content_then_refused_and_nothing_written(
    client: tdserve.Client, name: str, read: Read, case: str
) -> None:
    out, error, match = REFUSED[case]
    before = [member.clone() for member in list_members(out)]
    with pytest.raises(error, match=match):
        read(client, name, rows(2) + 7, out)
    for member, old in zip(list_members(out), before, strict=True):
        assert (member == old).all()


def test_out_when_locked_and_a_value_would_change_then_refused_and_nothing_written(
    client: tdserve.Client, name: str
) -> None:
    client.publish(name, rows(2).set_non_tensor("text", "new"))
    out = lazy_stack([row().set_non_tensor("text", "old"), row().set_non_tensor("text", "old")]).lock_()
    with pytest.raises(NotSupportedError, match="locked"):
        client.latest(name, out=out)
    assert out["number"].tolist() == [0, 0]
    same = lazy_stack([row().set_non_tensor("text", "new"), row().set_non_tensor("text", "new")]).lock_()
    client.latest(name, out=same)
    assert same["number"].tolist() == [1, 2]
