"""Kinds whose rows differ: lazy stacks and nested tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    lazy_stack,
    maybe_dense_stack,
)
from tensordict.nn import TensorDictParams

from tests.conformance.kind import ROWS, by_tensordict, kind, numbers


class Agent(TensorClass):
    """The observations of an agent; not every agent has every key."""

    x: torch.Tensor
    y: torch.Tensor | None = None


class Sight(TypedTensorDict):
    """A typed tensordict."""

    x: torch.Tensor


def row(size: int, **more: Any) -> TensorDict:
    """Returns a row with a tensor of its own size."""
    return TensorDict({"x": numbers(size, start=size), "y": torch.tensor(float(size)), **more})


@kind("lazy stack of one shape")
def stack_even() -> Any:
    """Rows of one structure."""
    return lazy_stack([TensorDict({"x": numbers(3, start=i), "n": {"y": numbers(1)}}) for i in range(ROWS)])


@kind("lazy stack of different shapes")
def stack_shapes() -> Any:
    """Rows whose tensors differ in size."""
    return lazy_stack([row(size) for size in (2, 1, 0, 3)])


@kind("lazy stack of different keys")
def stack_keys() -> Any:
    """Rows with keys of their own."""
    more: list[dict[str, Any]] = [{}, {"extra": torch.ones(2)}, {"text": "a"}, {"n": TensorDict({"z": torch.zeros(1)})}]
    return lazy_stack([row(2, **each) for each in more])


@kind("lazy stack of different dtypes and kinds")
def stack_dtypes() -> Any:
    """Rows with different types of content at one key."""
    entries = [torch.ones(2), torch.ones(2, dtype=torch.int64), "text", TensorDict({"a": torch.ones(1)})]
    return lazy_stack([TensorDict({"x": entry}) for entry in entries])


@kind("lazy stack with a named dimension")
def stack_named() -> Any:
    """The dimension of the rows has a name, and so have the rows' own dimensions."""
    rows = [TensorDict({"x": numbers(2, size)}, [2], names=["agent"]) for size in (1, 2, 3, 4)]
    return LazyStackedTensorDict(*rows, stack_dim=0, stack_dim_name="time")


@kind("lazy stack along dimension 1")
def stack_dim_1() -> Any:
    """Stacked along dimension 1, so that the rows are columns of the stack."""
    rows = [TensorDict({"x": numbers(ROWS, size)}, [ROWS], names=["time"]) for size in (1, 2, 3)]
    return LazyStackedTensorDict(*rows, stack_dim=1, stack_dim_name="agent")


@kind("lazy stack along dimension 2 of different keys", has_rows=False)
def stack_dim_2() -> Any:
    """Stacked along dimension 2; the members differ."""
    members = [TensorDict({f"x{i}": numbers(ROWS, 2, i + 1)}, [ROWS, 2]) for i in range(2)]
    return LazyStackedTensorDict(*members, stack_dim=2)


@kind("lazy stack of lazy stacks")
def stack_nested() -> Any:
    """The members are themselves stacks of different shapes."""
    return lazy_stack([lazy_stack([row(size), row(size + 1)]) for size in range(ROWS)])


@kind("lazy stack in a tensordict")
def stack_in_dense() -> Any:
    """A stack as a node of a tensordict."""
    return TensorDict({"plain": numbers(ROWS), "stack": stack_shapes(), "other": stack_keys()}, [ROWS])


@kind("lazy stack along dimension 1 in a tensordict")
def stack_dim_1_in_dense() -> Any:
    """A node with one dimension more than the tensordict that holds it."""
    return TensorDict({"plain": numbers(ROWS), "stack": stack_dim_1()}, [ROWS])


def agents(batch_size: list[int], dim: int, names: list[str] | None = None) -> Any:
    """Returns a stack of members with keys of their own and one common key."""
    inner = batch_size[:dim] + batch_size[dim + 1 :]
    members = [
        TensorDict(
            {
                f"x{number}": numbers(*inner, number + 1, start=number),
                "n": TensorDict({"y": numbers(*inner, start=number)}, inner),
                "word": f"member {number}",
                **({} if number % 2 else {"extra": TensorDict({"z": numbers(*inner, 2)}, inner)}),
            },
            inner,
            names=None if names is None else names[:dim] + names[dim + 1 :],
        )
        for number in range(batch_size[dim])
    ]
    return LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name=None if names is None else names[dim])


@kind("lazy stack along dimension 1 of different keys in a tensordict")
def agents_along_1() -> Any:
    """Below one batch dimension, with a member for each agent."""
    return TensorDict({"x": numbers(ROWS), "agents": agents([ROWS, 3], 1)}, [ROWS])


@kind("lazy stack along dimension 2 of different keys in a tensordict")
def agents_along_2() -> Any:
    """Below two batch dimensions, and nested deeper."""
    names = ["time", "step", "agent"]
    nested = TensorDict({"agents": agents([ROWS, 2, 3], 2, names)}, [ROWS, 2], names=names[:2])
    return TensorDict({"x": numbers(ROWS, 2), "nested": nested}, [ROWS, 2], names=names[:2])


@kind("lazy stack along the first of two batch dimensions, of different keys")
def agents_along_0() -> Any:
    """The stack is along the rows, each of which is dense."""
    return TensorDict({"x": numbers(ROWS, 2), "agents": agents([ROWS, 2], 0)}, [ROWS, 2])


@kind("lazy stack along the second of two batch dimensions, of different keys")
def agents_along_second() -> Any:
    """The same with another dimension behind it."""
    return TensorDict({"x": numbers(ROWS, 2), "agents": agents([ROWS, 2, 3], 1)}, [ROWS, 2])


def of_every_kind(batch_size: list[int], dim: int) -> Any:
    """Returns a stack whose members hold, or are, everything that elements by themselves do not show."""
    inner = batch_size[:dim] + batch_size[dim + 1 :]

    def words(*sizes: int) -> Any:
        return NonTensorStack(*[words(*sizes[1:]) for _ in range(sizes[0])]) if sizes else NonTensorData(data="same")

    def member(**entries: Any) -> TensorDict:
        return TensorDict({"x": numbers(*inner, 2), **entries}, inner)

    parts = [numbers(size) for size in range(1, inner[0] + 1)]
    members: list[Any] = [
        member(tokens=torch.nested.nested_tensor(parts, layout=torch.jagged)) if len(inner) == 1 else member(),
        member(weight=torch.nn.Parameter(numbers(*inner, 3)), mean=torch.nn.Buffer(numbers(*inner))),
        member(word=words(*inner)),
        member(n=TensorDict({"y": numbers(*inner)}, inner).lock_()),
        member(z=numbers(*inner)).lock_(),
        lazy_stack([TensorDict({"x": numbers(*inner[1:], 3)}, inner[1:]) for _ in range(inner[0])]),
        member(rows=lazy_stack([TensorDict({"y": numbers(*inner[1:])}, inner[1:]) for _ in range(inner[0])])),
        TensorDictParams(member(w=numbers(*inner, 1))),
        member(
            unlike=LazyStackedTensorDict(
                TensorDict({"w": words(*inner)}, inner), TensorDict({"y": numbers(*inner)}, inner), stack_dim=len(inner)
            )
        ),
    ]
    return LazyStackedTensorDict(*members[: batch_size[dim]], stack_dim=dim)


@kind("lazy stack along dimension 1 of members of every kind in a tensordict")
def every_kind_along_1() -> Any:
    """Below one batch dimension."""
    return TensorDict({"x": numbers(ROWS), "members": of_every_kind([ROWS, 9], 1)}, [ROWS])


@kind("lazy stack along dimension 2 of members of every kind in a tensordict")
def every_kind_along_2() -> Any:
    """Below two batch dimensions."""
    return TensorDict({"x": numbers(ROWS, 2), "members": of_every_kind([ROWS, 2, 9], 2)}, [ROWS, 2])


@kind("lazy stack along the second of two batch dimensions, of members of every kind")
def every_kind_along_second() -> Any:
    """The stack is along the columns of the batch."""
    return TensorDict({"x": numbers(ROWS, 9), "members": of_every_kind([ROWS, 9], 1)}, [ROWS, 9])


@kind("lazy stack along the first of two batch dimensions, of members of every kind")
def every_kind_along_0() -> Any:
    """The stack is along the rows."""
    return TensorDict({"x": numbers(ROWS, 2), "members": of_every_kind([ROWS, 2], 0)}, [ROWS, 2])


def seen() -> list[Any]:
    """Instances that differ in their entries."""
    return [Agent(x=numbers(ROWS, size), y=numbers(ROWS) if size > 1 else None, batch_size=[ROWS]) for size in (1, 2)]


@kind("tensorclass around a lazy stack along dimension 1 in a tensordict")
def instances_along_1() -> Any:
    """The result of ``lazy_stack`` of instances."""
    return TensorDict({"agents": lazy_stack(seen(), 1)}, [ROWS])


def rows_of_stacked(td: Any, index: Any) -> Any:
    """Returns rows in which a stack of instances remains one: tensordict's own indexing makes an instance around a
    stack."""
    with by_tensordict():
        rows = td[index]
    agents = rows["agents"]
    content = getattr(agents, "_tensordict", None)
    if isinstance(content, LazyStackedTensorDict) and isinstance(td["agents"], LazyStackedTensorDict):
        members = [type(agents).from_tensordict(member) for member in content.tensordicts]
        rows["agents"] = LazyStackedTensorDict(*members, stack_dim=content.stack_dim)
    return rows


@kind("LazyStackedTensorDict of instances along dimension 1 in a tensordict", local=rows_of_stacked)
def stack_of_instances_along_1() -> Any:
    """The members are instances."""
    return TensorDict({"agents": LazyStackedTensorDict(*seen(), stack_dim=1)}, [ROWS])


def sighted(batch_size: list[int], dim: int) -> Any:
    """A stack of instances of different sizes."""
    inner = batch_size[:dim] + batch_size[dim + 1 :]
    members = [Agent(x=numbers(*inner, size + 1), batch_size=inner) for size in range(batch_size[dim])]
    return LazyStackedTensorDict(*members, stack_dim=dim)  # type: ignore[type-var]  # tensordict takes instances


@kind("LazyStackedTensorDict of instances along the first of two batch dimensions", local=rows_of_stacked)
def stack_of_instances_along_first() -> Any:
    """The stack is along the rows."""
    return TensorDict({"x": numbers(ROWS, 2), "agents": sighted([ROWS, 2], 0)}, [ROWS, 2])


@kind("LazyStackedTensorDict of instances along the second of two batch dimensions", local=rows_of_stacked)
def stack_of_instances_along_second() -> Any:
    """The stack is along the columns of the batch."""
    return TensorDict({"x": numbers(ROWS, 2), "agents": sighted([ROWS, 2], 1)}, [ROWS, 2])


@kind("LazyStackedTensorDict of instances behind two batch dimensions", local=rows_of_stacked)
def stack_of_instances_behind() -> Any:
    """Each element has all of the members."""
    return TensorDict({"x": numbers(ROWS, 2), "agents": sighted([ROWS, 2, 3], 2)}, [ROWS, 2])


@kind("lazy stack of TypedTensorDicts along the first of two batch dimensions")
def stack_of_typed() -> Any:
    """The stack is along the rows."""
    members = [Sight(x=numbers(2, size), batch_size=[2]) for size in range(1, ROWS + 1)]
    return TensorDict({"x": numbers(ROWS, 2), "agents": lazy_stack(members)}, [ROWS, 2])


@kind("locked lazy stack")
def stack_locked() -> Any:
    """Locked as a whole."""
    return lazy_stack([row(size) for size in (2, 1, 0, 3)]).lock_()


@kind("locked lazy stack of different keys")
def stack_keys_locked() -> Any:
    """Locked as a whole."""
    return stack_keys().lock_()


@kind("lazy stack with a locked row")
def stack_locked_row() -> Any:
    """Only one row is locked."""
    rows = [row(size) for size in (2, 1, 0, 3)]
    rows[1].lock_()
    return lazy_stack(rows)


@kind("a dense stack")
def stack_dense() -> Any:
    """The result of ``maybe_dense_stack`` of rows that fit."""
    return maybe_dense_stack([row(2) for _ in range(ROWS)])


@kind("jagged")
def jagged() -> Any:
    """A nested tensor of layout jagged."""
    parts = [numbers(size, 2) for size in (1, 3, 2, 4)]
    return TensorDict({"x": torch.nested.nested_tensor(parts, layout=torch.jagged), "y": numbers(ROWS)}, [ROWS])


@kind("jagged with lengths")
def jagged_lengths() -> Any:
    """With holes between the components."""
    nested = torch.nested.nested_tensor_from_jagged(
        numbers(10), offsets=torch.tensor([0, 2, 5, 8, 10]), lengths=torch.tensor([1, 3, 2, 2])
    )
    return TensorDict({"x": nested}, [ROWS])


def components(td: Any, index: Any) -> Any:
    """Returns the components of nested tensors. Torch cannot index strided ones, so rows of them are stacked again."""
    parts = td["x"].unbind()
    if isinstance(index, int):
        return TensorDict({"x": parts[index]}, [])
    chosen = [parts[number] for number in torch.arange(len(parts))[index].tolist()]
    return TensorDict({"x": torch.nested.nested_tensor(chosen)}, [len(chosen)])


@kind("strided nested", local=components)
def strided_nested() -> Any:
    """A nested tensor of layout strided."""
    return TensorDict({"x": torch.nested.nested_tensor([numbers(2, size) for size in (1, 3, 2, 4)])}, [ROWS])


@kind("nested tensors in a lazy stack")
def nested_in_stack() -> Any:
    """Each row holds a nested tensor."""
    parts = [[numbers(1), numbers(size)] for size in (1, 2, 3, 4)]
    rows = [TensorDict({"x": torch.nested.nested_tensor(part, layout=torch.jagged)}, [2]) for part in parts]
    return LazyStackedTensorDict(*rows, stack_dim=0)


@kind("strided nested tensors in a lazy stack")
def strided_in_stack() -> Any:
    """Each row holds a strided nested tensor."""
    parts = [[numbers(1), numbers(size)] for size in (1, 2, 3, 4)]
    return LazyStackedTensorDict(*(TensorDict({"x": torch.nested.nested_tensor(part)}, [2]) for part in parts))
