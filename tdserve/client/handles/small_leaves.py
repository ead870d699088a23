"""Reads one small tensor of a mapped store: the cheapest read, since almost nothing is prepared for it."""

from __future__ import annotations

import torch

from tdserve.client.local.local_reads import MAX_CLONED_BYTES
from tdserve.client.session.calls import SessionClient
from tdserve.data.opened import MappedStore
from tdserve.structure.fake_tensors import META
from tdserve.structure.nodes import TensorKind, TensorLeaf
from tdserve.structure.tree import Path, Spec


def read_small_leaf(client: SessionClient, name: str, spec: Spec, path: Path) -> torch.Tensor | None:
    """Returns a copy of a leaf as of one moment; None if it is no leaf, or must be read in the general way.

    Args:
        spec: The store's structure, as last read.

    Raises:
        ClosedError, ForkedClientError: The client cannot be used.
    """
    leaf = spec.tensors_by_path.get(path)
    if leaf is None or leaf.nbytes > MAX_CLONED_BYTES or not _is_plain(spec, leaf):
        return None
    client.catalog.check_usable()
    mover = client.mover
    store = None if mover is None or client.pool.is_shared else mover.find_known(name, spec)
    return None if store is None else _copy_leaf(store, path)


def _is_plain(spec: Spec, leaf: TensorLeaf) -> bool:
    """Returns whether a read of a leaf gives exactly the tensor in the files."""
    is_marked = leaf.kind is not TensorKind.PLAIN or leaf.requires_grad
    return not is_marked and not spec.has_ragged and spec.root.device != META


def _copy_leaf(store: MappedStore, path: Path) -> torch.Tensor | None:
    generations = store.generations
    values = generations.values
    before = int(values[-1])
    if before & 1:  # odd: a write is in progress
        return None
    found = store.leaves[path].clone()
    return found if store.is_current and int(values[-1]) == before else None
