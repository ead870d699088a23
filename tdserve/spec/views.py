"""Tensordicts that show the entries of another one, or of a file, instead of holding their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import PersistentTensorDict, TensorDict
from tensordict._lazy import _CustomOpTensorDict
from tensordict._td import _SubTensorDict
from tensordict.base import NO_DEFAULT

from tdserve.spec.files import file_items, is_in_file


def shows_others(kind: type) -> bool:
    """Whether tensordicts of a class are read entry by entry: sub-tensordicts, the lazy views (``view``, ``permute``,
    ``transpose``, ``squeeze``, ``unsqueeze``) of ``set_lazy_legacy(True)``, and those of files."""
    return issubclass(kind, (_SubTensorDict, _CustomOpTensorDict, PersistentTensorDict))


def items_of(td: Any) -> Iterable[tuple[str, Any]]:
    """Keys and entries as they are held: nothing is unwrapped, nothing is read from a file."""
    if type(td) is TensorDict:  # the dict itself: TensorDict.items() makes views
        items: Iterable[tuple[str, Any]] = td._tensordict.items()
        return items
    if is_in_file(td):
        return file_items(td)
    keys = td.keys()
    return [(key, td._get_str(key, NO_DEFAULT)) for key in keys]
