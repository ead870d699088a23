"""Tensordicts of every kind whose rows differ in shape, and when two of them are equal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
    lazy_stack,
    set_list_to_stack,
    tensorclass,
)

Stack: Any = LazyStackedTensorDict


@tensorclass
class Turns:
    """A history: what was split_turns, turn by turn."""

    role: str
    content: str
    tool_calls: list[Any] | None = None
    tokens: torch.Tensor | None = None


made: Any = Turns  # type checkers do not know what the decorator adds to its constructor


def jagged(lengths: Sequence[int], rest: tuple[int, ...] = (), dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A jagged nested tensor; also one without components, and of any dtype."""
    values = torch.randint(0, 2, (sum(lengths), *rest)).to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def strided(*shapes: tuple[int, ...]) -> torch.Tensor:
    """A strided nested tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.rand(shape) for shape in shapes], dtype=torch.float32)


def turns(num_turns: int, **more: Any) -> Any:
    """A dense history."""
    texts = [f"turn {number}" for number in range(num_turns)]
    with set_list_to_stack(True):
        return made(role=texts, content=texts, batch_size=[num_turns], **more)


def split_turns(*calls: Any) -> Any:
    """A history that is a lazy stack of single turns, of which only some have tool calls."""
    with set_list_to_stack(True):
        found: list[Any] = [
            made(
                role="user",
                content=f"{call}",
                tokens=torch.rand(number + 1),
                batch_size=[],
                **({"tool_calls": [call]} if call else {}),
            )
            for number, call in enumerate(calls)
        ]
    return lazy_stack(found)


def rows(*sizes: int, **more: Any) -> list[TensorDict]:
    """Rows with a tensor of these sizes."""
    return [TensorDict({"a": torch.rand(size), "s": f"{size}", "r": torch.rand(2), **more}) for size in sizes]


def turn_rows(*sizes: int) -> list[TensorDict]:
    """Rows that differ in batch size."""
    return [TensorDict({"a": torch.rand(size, 2)}, [size]) for size in sizes]


def cases() -> dict[str, Any]:
    """Ragged tensordicts by what is special about them."""
    dtypes = (torch.bool, torch.bfloat16, torch.complex64, torch.uint16)
    lengths = torch.nested.nested_tensor_from_jagged(
        torch.rand(10, 2), offsets=torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 3])
    )
    named = [TensorDict({"a": torch.rand(2, size)}, [2], names=["x"]) for size in (3, 5)]
    nested_rows = [TensorDict({"n": {"k": torch.rand(size, 2), "d": NonTensorData({"a": size})}}) for size in (1, 2)]
    with set_list_to_stack(True):
        ragged_texts = TensorDict({"s": [["a", "b"], ["c"]]}, [2])
    return {
        "jagged": TensorDict({"t": jagged([3, 0, 5]), "r": torch.rand(3)}, [3]),
        "jagged, equal lengths": TensorDict({"t": jagged([3, 3])}, [2]),
        "jagged, one row": TensorDict({"t": jagged([3])}, [1]),
        "jagged, no rows": TensorDict({"t": jagged([], (4,))}, [0]),
        "jagged, all empty": TensorDict({"t": jagged([0, 0], (4,))}, [2]),
        **{f"jagged, {dtype}": TensorDict({"t": jagged([1, 7], (4,), dtype)}, [2]) for dtype in dtypes},
        "jagged, nested key": TensorDict({"n": TensorDict({"t": jagged([3, 5], (2,))}, [2])}, [2]),
        "jagged, with lengths": TensorDict({"t": lengths}, [2]),
        "jagged, transposed": TensorDict({"t": jagged([3, 5], (4,)).transpose(1, 2)}, [2]),
        "jagged, no batch": TensorDict({"t": jagged([3, 5])}, []),
        "jagged, two batch dimensions": TensorDict({"t": jagged([3, 5], (4,)).transpose(1, 2)}, [2, 4]),
        "jagged in lazy rows": Stack(*[TensorDict({"t": jagged([size, 2])}, [2]) for size in (1, 3)]),
        "strided": TensorDict({"t": strided((3, 2), (5, 4))}, [2]),
        "strided, equal shapes": TensorDict({"t": strided((3, 2), (3, 2))}, [2]),
        "stack": Stack(*rows(3, 1, 0)),
        "stack, equal shapes": Stack(*rows(3, 3)),
        "stack, one row": Stack(*rows(3)),
        "stack, no rows": Stack(batch_size=[], stack_dim=0),
        "stack, two ragged dimensions": Stack(*[TensorDict({"a": torch.rand(size, 5 - size)}) for size in (1, 5)]),
        "stack along 1": Stack(*[TensorDict({"a": torch.rand(2, size)}, [2]) for size in (3, 5, 1)], stack_dim=1),
        "stack with names": Stack(*named, stack_dim_name="rows"),
        "stack with nested keys": Stack(*nested_rows),
        "stack of rows with other keys": Stack(
            TensorDict({"a": torch.rand(3), "s": "x"}), TensorDict({"a": torch.rand(3)})
        ),
        "stack of rows with other dtypes": Stack(TensorDict({"a": torch.rand(3)}), TensorDict({"a": torch.arange(3)})),
        "stack in a dense one": TensorDict({"n": Stack(*rows(3, 5)), "r": torch.rand(2)}, [2]),
        "stack, ragged batch": Stack(*turn_rows(3, 0)),
        "stack, ragged batch, in a dense one": TensorDict({"n": Stack(*turn_rows(3, 5)), "r": torch.rand(2)}, [2]),
        "stack of stacks": Stack(Stack(*rows(3, 4)), Stack(*rows(1))),
        "tensorclass": lazy_stack([turns(2)[0], turns(3)[1]]),
        "histories": lazy_stack([turns(2, tokens=torch.rand(2, 3)), turns(1)]),
        "histories, equal lengths": lazy_stack([turns(2), turns(2)]),
        "histories beside others": TensorDict({"h": lazy_stack([turns(2), turns(3)]), "t": jagged([3, 4])}, [2]),
        "histories of single turns": lazy_stack([split_turns({"f": {"x": [1]}}, None), split_turns(None, None, None)]),
        "ragged values": ragged_texts,
    }


CASES = cases()


def check_same(left: Any, right: Any, where: str = "") -> None:
    """Raises AssertionError unless both are equal in type, structure, value."""
    if isinstance(left, NonTensorStack):
        assert isinstance(right, NonTensorStack), where
        assert (left.batch_size, left.tolist()) == (right.batch_size, right.tolist()), where
        return
    if isinstance(left, LazyStackedTensorDict):
        assert isinstance(right, LazyStackedTensorDict), where
        assert (left.stack_dim, left.batch_size, left.names) == (right.stack_dim, right.batch_size, right.names), where
        assert len(left.tensordicts) == len(right.tensordicts), where
        for number, (row, other) in enumerate(zip(left.tensordicts, right.tensordicts, strict=True)):
            check_same(row, other, f"{where}/{number}")
        return
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        _check_tensors(left, right, where)
    elif isinstance(left, NonTensorData):
        assert (left.batch_size, left.data, type(left.data)) == (right.batch_size, right.data, type(right.data)), where
    elif is_tensorclass(type(left)):
        check_same(left._tensordict, right._tensordict, where)
    else:
        assert (left.batch_size, left.names) == (right.batch_size, right.names), where
        assert set(left._tensordict) == set(right._tensordict), where
        for key, entry in left._tensordict.items():
            check_same(entry, right._tensordict[key], f"{where}.{key}")


def _check_tensors(left: Any, right: Any, where: str) -> None:
    assert (left.dtype, left.layout, left.is_nested) == (right.dtype, right.layout, right.is_nested), where
    if not left.is_nested:
        assert left.shape == right.shape, where
        assert (
            left.contiguous().view(-1).view(torch.uint8).tolist()
            == right.contiguous().view(-1).view(torch.uint8).tolist()
        )
        return
    if left.layout is torch.jagged:
        assert left._ragged_idx == right._ragged_idx, where
        assert (left.lengths() is None) is (right.lengths() is None), where
    components = left.unbind(), right.unbind()
    assert len(components[0]) == len(components[1]), where
    for component, other in zip(*components, strict=True):
        _check_tensors(component, other, where)
