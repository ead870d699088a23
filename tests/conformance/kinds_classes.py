# mypy: ignore-errors
# tensordict's classes take more than their annotations say.
"""Kinds of tensorclasses: every flavour, field and way in which they hold one another."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)

from tests.conformance.kind import ROWS, is_by_tensordict, kind, numbers
from tests.tensordict_versions import IS_OLD


class Plain(TensorClass):
    """The first example of the documentation."""

    tensor: torch.Tensor
    non_tensor: Any
    nested: Any = None


@tensorclass
class Decorated:
    """With the decorator."""

    x: torch.Tensor
    y: str = "default"


@tensorclass(autocast=True)
class DecoratedAutocast:
    """Values are cast when they are read."""

    integer: int
    word: str
    number: float = 0.5


class Autocast(TensorClass["autocast"]):
    """Values are cast when they are read."""

    integer: int
    tensor: torch.Tensor


class AutocastKeyword(TensorClass, autocast=True):
    """The same, by keyword."""

    integer: int


class Nocast(TensorClass["nocast"]):
    """Numbers stay as they are."""

    integer: int
    tensor: torch.Tensor
    number: float = 1.5


@tensorclass(nocast=True)
class DecoratedNocast:
    """With the decorator."""

    integer: int


class TensorOnly(TensorClass["tensor_only"]):
    """Tensors only."""

    x: torch.Tensor
    y: torch.Tensor


class Frozen(TensorClass["frozen"]):
    """A frozen class."""

    x: torch.Tensor
    word: str = "frozen"


class FrozenNocast(TensorClass["nocast", "frozen"]):
    """Two options."""

    integer: int


if not IS_OLD:  # it takes the method of that name for the default of a field

    class Shadow(TensorClass["shadow"]):
        """Fields whose names have another meaning in tensordicts."""

        data: torch.Tensor
        keys: torch.Tensor
        values: str = "values"


class Base(TensorClass["autocast", "frozen"]):
    """A base class. The documentation adds ``frozen`` in the subclass, which dataclasses refuse."""

    x: int


class Sub(Base, frozen=True):
    """A subclass with more fields and with the options of its base."""

    y: float


class Child(Plain):
    """A subclass of a subclass."""

    more: torch.Tensor | None = None


class Defaults(TensorClass):
    """Optional fields."""

    x: torch.Tensor
    nothing: torch.Tensor | None = None
    words: dict[str, int] = field(default_factory=lambda: {"a": 1})
    made: torch.Tensor = field(default_factory=lambda: torch.zeros(ROWS))


class Counted(TensorClass):
    """Changes its arguments once, when it is made."""

    x: torch.Tensor
    doubled: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if is_by_tensordict():
            return
        self.x = self.x + 1
        self.doubled = self.x * 2


class Holder(TensorClass):
    """Holds other instances, tensordicts and values."""

    inner: Plain
    counted: Counted | None = None
    td: TensorDict | None = None
    frozen: Frozen | None = None
    anything: Any = None


class State(TypedTensorDict):
    """A typed tensordict."""

    eta: torch.Tensor
    x: torch.Tensor


class SubState(State):
    """A typed tensordict with one field more."""

    z: torch.Tensor


def plain(*batch_size: int) -> Any:
    """An instance with one value for all rows."""
    return Plain(tensor=numbers(*batch_size), non_tensor="a string!", batch_size=list(batch_size))


@kind("TensorClass")
def instance() -> Any:
    """As in the documentation."""
    return plain(ROWS)


@kind("TensorClass without batch", has_rows=False)
def instance_alone() -> Any:
    """Of batch size []."""
    return Plain(tensor=numbers(3), non_tensor={"a": [1, None]}, nested=plain(2), batch_size=[])


@kind("TensorClass with names and device")
def instance_named() -> Any:
    """Everything that a tensordict may have."""
    return Plain(tensor=numbers(ROWS, 2), non_tensor="named", batch_size=[ROWS], names=["time"], device="cpu")


@kind("TensorClass of a value per row")
def instance_values() -> Any:
    """Stacked from rows."""
    return torch.stack([Plain(tensor=numbers(2), non_tensor=f"row {i}", batch_size=[]) for i in range(ROWS)])


@kind("tensorclass of the decorator")
def decorated() -> Any:
    """With its default value."""
    return Decorated(x=numbers(ROWS), batch_size=[ROWS])


@kind("autocast of the decorator")
def decorated_autocast() -> Any:
    """Numbers and strings."""
    return DecoratedAutocast(integer=3, word="word", batch_size=[ROWS])


@kind("autocast")
def autocast() -> Any:
    """A number, and a tensor."""
    return Autocast(integer=1, tensor=numbers(ROWS), batch_size=[ROWS])


@kind("autocast of a tensor", has_rows=False)
def autocast_tensor() -> Any:
    """Read as a number."""
    return AutocastKeyword(integer=torch.ones(()))


@kind("nocast")
def nocast() -> Any:
    """Numbers beside a tensor."""
    return Nocast(integer=1, tensor=numbers(ROWS), batch_size=[ROWS])


@kind("nocast of the decorator", has_rows=False)
def decorated_nocast() -> Any:
    """A number alone."""
    return DecoratedNocast(integer=1)


@kind("tensor_only")
def tensor_only() -> Any:
    """Tensors only."""
    return TensorOnly(x=numbers(ROWS), y=numbers(ROWS, 2), batch_size=[ROWS])


@kind("frozen")
def frozen() -> Any:
    """A frozen instance."""
    return Frozen(x=numbers(ROWS), batch_size=[ROWS])


@kind("nocast and frozen", has_rows=False)
def frozen_nocast() -> Any:
    """Two options."""
    return FrozenNocast(integer=7)


if not IS_OLD:

    @kind("shadow")
    def shadow() -> Any:
        """Fields with names of tensordict's own."""
        return Shadow(data=numbers(ROWS), keys=numbers(ROWS, 2), batch_size=[ROWS])


@kind("a subclass that inherits its options")
def subclass() -> Any:
    """Cast and frozen."""
    return Sub(x=1, y=2.5, batch_size=[ROWS])


@kind("a subclass of a subclass")
def grandchild() -> Any:
    """One field more, which is None."""
    return Child(tensor=numbers(ROWS), non_tensor="a", more=numbers(ROWS), batch_size=[ROWS])


@kind("fields that are None or made")
def defaults() -> Any:
    """No optional field is given."""
    return Defaults(x=numbers(ROWS), batch_size=[ROWS])


@kind("__post_init__")
def counted() -> Any:
    """``__post_init__`` ran once."""
    return Counted(x=numbers(ROWS), batch_size=[ROWS])


@kind("tensorclasses in one another")
def holder() -> Any:
    """Instances in instances, in tensordicts and in values."""
    return Holder(
        inner=plain(ROWS, 2),
        counted=counted(),
        td=TensorDict({"deep": plain(ROWS)}, [ROWS]),
        frozen=frozen(),
        anything=lazy_stack([TensorDict({"x": numbers(size)}) for size in (1, 2, 3, 4)]),
        batch_size=[ROWS],
    )


@kind("tensorclasses in a tensordict")
def in_tensordict() -> Any:
    """Instances of several classes."""
    shadows = {} if IS_OLD else {"shadow": shadow()}
    return TensorDict({"plain": plain(ROWS), "nocast": nocast(), "frozen": frozen(), **shadows}, [ROWS])


@kind("locked tensorclass")
def locked_instance() -> Any:
    """Locked as a whole."""
    return holder().lock_()


@kind("lazy stack of instances of different shapes")
def stacked_instances() -> Any:
    """Each row is an instance."""
    rows = [Plain(tensor=numbers(size), non_tensor=f"row {size}", batch_size=[]) for size in (1, 2, 3, 4)]
    return lazy_stack(rows)


@kind("LazyStackedTensorDict of instances", has_rows=False)
def stack_of_instances() -> Any:
    """A stack whose members are instances; tensordict makes an instance of a slice of it."""
    rows = [Counted(x=numbers(2), batch_size=[2]) for _ in range(ROWS)]
    return LazyStackedTensorDict(*rows, stack_dim=0)


@kind("lazy stack of frozen instances")
def stacked_frozen() -> Any:
    """Frozen instances."""
    return lazy_stack([Frozen(x=numbers(size), word=f"row {size}", batch_size=[]) for size in (1, 2, 3, 4)])


@kind("lazy stack of instances that hold instances")
def stacked_holders() -> Any:
    """Instances of different sizes, some with optional fields."""
    rows = [
        Holder(inner=plain(size), counted=Counted(x=numbers(size), batch_size=[size]) if size % 2 else None)
        for size in (1, 2, 3, 4)
    ]
    return lazy_stack(rows)


@kind("lazy stack of instances in a tensordict")
def stacked_in_tensordict() -> Any:
    """The stack is a node of a tensordict."""
    return TensorDict({"turns": stacked_instances(), "x": numbers(ROWS)}, [ROWS])


@kind("tensorclass around a lazy stack")
def around_stack() -> Any:
    """An instance around a stack."""
    rows = [TensorDict({"tensor": numbers(size), "non_tensor": NonTensorData("a")}) for size in (1, 2, 3, 4)]
    return Plain.from_tensordict(lazy_stack(rows))


@kind("tensorclass of non-tensor stacks")
def value_stack_instance() -> Any:
    """A field with one value per row."""
    values = NonTensorStack(*(NonTensorData(word) for word in "abcd"))
    return Plain(tensor=numbers(ROWS), non_tensor=values, batch_size=[ROWS])


@kind("TypedTensorDict")
def typed() -> Any:
    """A typed tensordict, as of tensordict 0.15."""
    return State(eta=numbers(ROWS), x=numbers(ROWS, 2), batch_size=[ROWS])


@kind("subclass of a TypedTensorDict")
def typed_sub() -> Any:
    """In a tensordict, locked."""
    inner = SubState(eta=numbers(ROWS), x=numbers(ROWS, 2), z=numbers(ROWS), batch_size=[ROWS])
    return TensorDict({"state": inner, "x": numbers(ROWS)}, [ROWS]).lock_()


@kind("UnbatchedTensor")
def unbatched() -> Any:
    """One value for the whole batch."""
    return TensorDict({"table": UnbatchedTensor(numbers(3, 4)), "b": numbers(ROWS, 3)}, [ROWS])


@kind("UnbatchedTensor in a lazy stack")
def unbatched_in_stack() -> Any:
    """One value in each row, beside entries that differ."""
    rows = [TensorDict({"table": UnbatchedTensor(numbers(2)), "x": numbers(size)}) for size in (1, 2, 3, 4)]
    return lazy_stack(rows)
