"""Replaces the content of a tensordict by that of any other, as tensordict's own ``load_memmap_`` does."""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_tensorclass

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.structure.stacks.shared_rows import find_shared
from tdserve.structure.tensordict_private import (
    content_of,
    entries_of,
    is_transparent_class,
    stored_fields,
    take_form,
    take_stack_form,
)


def take_over(td: Any, source: Any, *, store: str = "") -> Any:
    """Makes a tensordict hold what another of its kind holds.

    Its leaves are replaced, and entries that ``source`` lacks are removed. Nested tensordicts that both have stay the
    same objects, and so do the rows of lazy stacks of equal length. It keeps its device, but not its batch size and
    names.

    Args:
        td: Changed in place; unlocked. A TensorDict, a lazy stack, or an instance of a tensorclass.
        source: Not used otherwise; from then on ``td`` contains its entries, unlocked.
        store: Name, for errors.

    Returns:
        ``td``.

    Raises:
        SpecMismatchError: The two are of different kinds. Nothing was changed.
        NotSupportedError: ``td`` is locked, or its entries cannot be replaced. Nothing was changed.
    """
    if td.is_locked:
        raise NotSupportedError(
            feature="replacing the entries of a locked tensordict", reason="unlock it with .unlock_()"
        )
    if not _is_kept(td, td):
        reason = "give a TensorDict, or update_() it with what load_memmap() returns"
        raise NotSupportedError(feature=f"replacing the entries of a {type(td).__name__}", reason=reason)
    if is_tensorclass(td) and type(source) is TensorDict:  # as in tensordict: the content replaces that of an instance
        td = content_of(td)
    if not _is_kept(td, source):
        raise SpecMismatchError(store=store, expected=f"a {type(source).__name__}", actual=f"a {type(td).__name__}")
    if source.is_locked:
        source.unlock_()
    _exchange(td, source if td.device is None else source.to(td.device))
    return td


def _is_kept(old: Any, new: Any) -> bool:
    """Returns whether an object can stay and take the content of another."""
    if is_tensorclass(old):
        is_value = is_transparent_class(type(old))
        is_same = type(new) is type(old) and not is_value
        return is_same and _is_kept(content_of(old), content_of(new))
    if isinstance(old, LazyStackedTensorDict) and not isinstance(old, NonTensorStack):
        return isinstance(new, LazyStackedTensorDict) and not isinstance(new, NonTensorStack)
    return type(old) is TensorDict and type(new) is TensorDict


def _exchange(td: Any, source: Any) -> None:
    if is_tensorclass(td):
        _exchange(content_of(td), content_of(source))
        fields = stored_fields(td)
        fields.clear()
        fields.update(stored_fields(source))
    elif isinstance(td, LazyStackedTensorDict):
        _exchange_rows(td, source)
    else:
        held = entries_of(td)
        entries = {key: _replace_entry(held.get(key), entry) for key, entry in entries_of(source).items()}
        held.clear()
        held.update(entries)
        take_form(td, source)


def _exchange_rows(td: Any, source: Any) -> None:
    old, new = td.tensordicts, source.tensordicts
    is_pairwise = len(old) == len(new) and find_shared(td, ()) is None  # else the last row's entries would be in others
    td.tensordicts = (
        [_replace_entry(mine, row) for mine, row in zip(old, new, strict=True)] if is_pairwise else list(new)
    )
    take_stack_form(td, source)


def _replace_entry(old: Any, new: Any) -> Any:
    """Returns what replaces an entry."""
    if old is None or not _is_kept(old, new):
        return new
    _exchange(old, new)
    return old
