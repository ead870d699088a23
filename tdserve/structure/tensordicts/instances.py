"""Tensorclasses and typed tensordicts by their names at both ends, and instances made without constructors."""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, TypedTensorDict
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensordict_private import (
    SEEN_CLASSES,
    get_inner_content,
    get_set_fields,
    is_transparent_class,
    params_content,
    set_contents,
    typed_content,
)
from tdserve.structure.trees.nodes import Path
from tdserve.structure.trees.tree import quote

_allows_unknown = ContextVar("_allows_unknown", default=False)


def get_class_name(kind: type) -> str:
    """Returns the name of a tensorclass for both ends."""
    return f"{kind.__module__}.{kind.__qualname__}"


def count_classes() -> int:
    """Returns how many types tensordict has registered: when it grows, a class may have been defined again."""
    return len(SEEN_CLASSES)


@contextmanager
def allow_unknown_classes() -> Iterator[None]:
    """Runs a block that builds instances of classes that this process does not know as the tensordicts in them, for
    programs that only show what is stored."""
    token = _allows_unknown.set(True)
    try:
        yield
    finally:
        _allows_unknown.reset(token)


def find_shown_class(name: str, path: Path, keys: AbstractSet[str]) -> Any:
    """Returns the class of instances to build; None within ``allow_unknown_classes`` if it is not known. Arguments and
    errors as in ``find_tensorclass``."""
    try:
        return find_tensorclass(name, path, keys)
    except NotSupportedError:
        if not _allows_unknown.get():
            raise
        return None


def find_tensorclass(name: str, path: Path, keys: AbstractSet[str]) -> Any:
    """Returns the registered class of that name; the newest, if a class was defined again. Never imports.

    Args:
        name: As returned by ``get_class_name``.
        path: Path of an instance, for errors.
        keys: Fields that the class must have.

    Raises:
        NotSupportedError: The class is unknown here, or lacks fields.
    """
    found = None
    for cls, is_tensorclass in list(SEEN_CLASSES.items()):
        if is_tensorclass and get_class_name(cls) == name and _has_tensors(cls):
            found = cls
    for cls in _iter_typed_classes(TypedTensorDict):
        if get_class_name(cls) == name:
            found = cls
    where = f" at key {quote(path)}" if path else ""
    if found is None:
        module = name.rpartition(".")[0]
        raise NotSupportedError(
            feature=f"tensorclass {name}{where}",
            reason=f"it is not defined in this process: import module {module} first",
        )
    # A typed tensordict may hold more than its fields.
    unknown = set() if issubclass(found, TypedTensorDict) else keys - found.__expected_keys__
    if unknown:
        raise NotSupportedError(
            feature=f"tensorclass {name}{where}", reason=f"this process's definition has no fields {sorted(unknown)}"
        )
    return found


def find_fields(name: str, path: Path = ()) -> AbstractSet[str]:
    """Returns the fields of the registered class of that name.

    None for a typed tensordict, which accepts other keys too.

    Raises:
        NotSupportedError: The class is unknown here.
    """
    found = find_tensorclass(name, path, frozenset())
    fields: AbstractSet[str] = frozenset() if issubclass(found, TypedTensorDict) else found.__expected_keys__
    return fields


def make_instance(tensorclass: Any, td: Any, non_tensordict: dict[str, Any]) -> Any:
    """Makes an instance around a tensordict without checks; ``__post_init__`` does not run."""
    if issubclass(tensorclass, TypedTensorDict):
        return tensorclass.from_tensordict(td, check=False)
    instance = tensorclass.__new__(tensorclass)
    set_contents(instance, td, non_tensordict)
    return instance


def find_content(wrapper: Any) -> Any:
    """Returns the content of a tensorclass instance, ``TensorDictParams`` or ``TypedTensorDict``; None for others."""
    if isinstance(wrapper, TensorDictParams):
        return params_content(wrapper)
    if isinstance(wrapper, TypedTensorDict):
        return typed_content(wrapper)
    return get_inner_content(wrapper)


def strip_wrappers(td: Any) -> Any:
    """Returns the TensorDict or lazy stack inside of all wrappers."""
    while not isinstance(td, (TensorDict, LazyStackedTensorDict)):
        td = find_content(td)
    return td


def to_stack(instance: Any) -> Any:
    """Converts an instance around a lazy stack to a stack of instances, as tensordict's indexing does.

    Returns an instance around anything else unchanged.
    """
    content = find_content(instance)
    if not isinstance(content, LazyStackedTensorDict) or not content.tensordicts:
        return instance
    beside = get_set_fields(instance)
    rows = [to_stack(make_instance(type(instance), row, dict(beside))) for row in content.tensordicts]
    return LazyStackedTensorDict(*rows, stack_dim=content.stack_dim, stack_dim_name=content.names[content.stack_dim])


def to_inner_stack(stack: LazyStackedTensorDict, name: str) -> tuple[LazyStackedTensorDict, bool]:
    """Converts a stack of instances of a class to its inner stack and True.

    Returns any other stack unchanged, and False.
    """
    rows = []
    for row in stack.tensordicts:
        content = find_content(row) if get_class_name(type(row)) == name else None
        if not isinstance(content, TensorDictBase):
            return stack, False
        beside = get_set_fields(row)
        if beside:
            content = content.copy()
        for key, value in beside.items():
            content.set_non_tensor(key, value)
        rows.append(content)
    if not rows:
        return stack, False
    name_of_dim = stack.names[stack.stack_dim]
    return LazyStackedTensorDict(*rows, stack_dim=stack.stack_dim, stack_dim_name=name_of_dim), True


def _iter_typed_classes(kind: type) -> Iterator[type]:
    """Yields all of them, older before newer ones."""
    cls: type
    for cls in kind.__subclasses__():
        yield cls
        yield from _iter_typed_classes(cls)


def _has_tensors(cls: type) -> bool:
    return not is_transparent_class(cls)
