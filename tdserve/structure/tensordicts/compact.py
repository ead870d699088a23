"""Tensordicts over one storage, split for a queue between processes and put together again.

torch sends each tensor by itself, with a class and a function by name for each: for a batch of small rows that takes as
long as reading it. Here a tensordict is one storage, and the positions of its leaves in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tdserve.structure.tensordict_private import entries_of, is_consolidated, names_of, new_tensordict
from tdserve.structure.tensors.independent_views import view_memory

Leaf = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Dtype, shape, strides and offset in elements."""


class Tree(NamedTuple):
    """A tensordict without its memory.

    Attributes:
        entries: Under each key a leaf, or a nested tensordict.
        device: Its name.
    """

    entries: dict[str, Leaf | Tree]
    batch_size: tuple[int, ...]
    names: list[str | None] | None
    device: str | None


def take_apart(td: TensorDict) -> tuple[torch.UntypedStorage, Tree] | None:
    """Returns the one storage of all leaves, and their positions in it.

    None for a tensordict that is not plain enough.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    tree = _compact_tree(td, storages)
    if tree is None or len(storages) != 1:
        return None
    (storage,) = storages.values()
    return storage, tree


def _compact_tree(td: TensorDict, storages: dict[int, torch.UntypedStorage]) -> Tree | None:
    if td.is_locked or is_consolidated(td):
        return None
    entries: dict[str, Leaf | Tree] = {}
    for key, item in entries_of(td).items():
        if type(item) is torch.Tensor:
            if item.requires_grad or item.layout is not torch.strided or item.is_conj() or item.is_neg():
                return None
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage
            entries[key] = (item.dtype, tuple(item.shape), item.stride(), int(item.storage_offset()))
        else:
            below = _compact_tree(item, storages) if type(item) is TensorDict else None
            if below is None:
                return None
            entries[key] = below
    names = names_of(td)
    device = None if td.device is None else str(td.device)
    return Tree(entries, tuple(td.batch_size), None if names is None else list(names), device)


def put_together(storage: torch.UntypedStorage, tree: Tree) -> TensorDict:
    """Reverses ``take_apart``."""
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return _build_node(memory, tree)


def _build_node(memory: NDArray[np.uint8], tree: Tree) -> TensorDict:
    source: dict[str, Any] = {}
    for key, entry in tree.entries.items():
        if isinstance(entry, Tree):
            source[key] = _build_node(memory, entry)
            continue
        dtype, shape, strides, offset = entry
        itemsize = dtype.itemsize
        in_bytes = [stride * itemsize for stride in strides]
        found = view_memory(memory, dtype, shape, offset * itemsize, in_bytes)
        source[key] = found.data  # with a version counter of its own
    return new_tensordict(  # type: ignore[no-any-return]
        source,
        batch_size=torch.Size(tree.batch_size),
        device=None if tree.device is None else torch.device(tree.device),
        names=tree.names,
        nested=False,
    )
