"""Tensordicts that show the entries of another one, or of a file, instead of holding entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensordict import LazyStackedTensorDict, PersistentTensorDict, TensorDict, is_non_tensor, is_tensor_collection

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensordict_private import LazyView, SubTensorDict, check_unlock, entries_of, get_held_entry
from tdserve.structure.tensordicts.instances import find_content
from tdserve.structure.tensors.file_tensors import is_in_file, iter_file_items
from tdserve.structure.trees.tree import Path, quote


def is_shown_by_entry(kind: type) -> bool:
    """Returns whether tensordicts of a class are read entry by entry.

    These are sub-tensordicts, the lazy views (``view``, ``permute``, ``transpose``, ``squeeze``, ``unsqueeze``) of
    ``set_lazy_legacy(True)``, and those of files.
    """
    return issubclass(kind, (SubTensorDict, LazyView, PersistentTensorDict))


def iter_items(td: Any) -> Iterable[tuple[str, Any]]:
    """Yields keys and entries as they are held: nothing is unwrapped, nothing is read from a file."""
    if type(td) is TensorDict:  # the dict itself: its items() makes views
        return entries_of(td).items()
    if is_in_file(td):
        return iter_file_items(td)
    keys = td.keys()
    return [(key, get_held_entry(td, key)) for key in keys]


def check_own_entries(td: Any, *, call: str, advice: str) -> None:
    """Checks that all nested tensordicts hold their own entries; reads nothing.

    Args:
        td: Tensordict or tensorclass instance.
        call: The call that must replace entries, for the message.
        advice: What to do instead.

    Raises:
        NotSupportedError: A part of it shows the entries of another tensordict, or of a file: replacing them would have
            no effect. Or it is part of a tensordict that is locked as a whole.
    """
    if td.is_locked:
        _check_unlockable(td, call, advice)
    for path, kind in _borrow(td, ()):
        feature = f"{call} of a {kind.__name__}" + (f" (at key {quote(path)})" if path else "")
        reason = f"it shows the entries of another tensordict or of a file and has none of its own: {advice}"
        raise NotSupportedError(feature=feature, reason=reason)


def _check_unlockable(td: Any, call: str, advice: str) -> None:
    try:
        check_unlock(td)
    except RuntimeError as error:
        reason = f"unlock the whole with .unlock_() first; or {advice}"
        raise NotSupportedError(feature=f"{call} of a part of a locked tensordict", reason=reason) from error


def _borrow(td: Any, path: Path) -> Iterator[tuple[Path, type]]:
    if is_shown_by_entry(type(td)):
        yield path, type(td)
    elif isinstance(td, LazyStackedTensorDict):
        for row in td.tensordicts:
            yield from _borrow(row, path)
    elif type(td) is TensorDict:
        for key, entry in entries_of(td).items():
            if is_tensor_collection(entry) and not is_non_tensor(entry):
                yield from _borrow(entry, (*path, key))
    elif is_tensor_collection(td):
        yield from _borrow(find_content(td), path)
