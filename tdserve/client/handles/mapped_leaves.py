"""Leaves of a mapped store, for a client on the server's machine: mapped all together, or a small one copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotSupportedError
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.read_content import on_cpu
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.local.local_reads import MAX_CLONED_BYTES
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.data.mapped_stores import MappedStore
from tdserve.data.values import ReadBlock, read_block
from tdserve.store.rows.mapping import open_leaves
from tdserve.structure.building.build import build
from tdserve.structure.captures.fake_tensors import META
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import TensorKind, TensorLeaf
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import control_pb2


def map_store(client: SessionClient, name: str, spec: Spec, *, writable: bool, deadline: Deadline) -> Any:
    """Maps the store's files as a locked tensordict; see ``StoreHandle.map``."""
    check_real("mapping a store")

    def attempt(session: Session, request: int, deadline: Deadline) -> Any:
        session.movers.reads.check_maps(f"mapping store {name!r}", writable=writable)
        asked = control_pb2.ReadRequest(
            store=name,
            fingerprint=spec.fingerprint,
            timeout_s=deadline.remaining_s,
            is_for_writing=writable,
            kind=control_pb2.STORE_KIND_TENSORDICT,
        )
        pending = session.send(request, read=asked)
        accepted = pending.wait(compute_answer_timeout_s(deadline), f"a read of {name!r}").done.accepted
        stored = codec.decode(accepted.spec) if accepted.HasField("spec") else spec
        store = session.movers.reads.open_mapped(name, stored, accepted)
        if writable:
            store.check_writable()
            if store.compares_rows:
                reason = (
                    "it was created with checksum=True, and such writes would look like damage; write by its handle"
                )
                raise NotSupportedError(feature=f"mapping store {name!r} writable", reason=reason)
        store.compare_rows(np.arange(stored.num_rows))
        values: bytes | ReadBlock = accepted.values
        if stored.values and not values:
            values = read_block(store, [path for path, _ in stored.values], None)
        found, decoded = decode_values(on_cpu(stored), values)
        leaves = open_leaves(store.folder, stored, writable=writable, is_private=not writable, is_shown=True)
        store.check_current()
        return build(found, leaves, decoded).lock_()

    return client.call(attempt, deadline, store=name)


def read_small_leaf(client: SessionClient, name: str, spec: Spec, path: Path) -> torch.Tensor | None:
    """Returns a copy of a leaf as of one moment; None if it is no leaf, or must be read in the general way.

    This is the cheapest read of a small tensor, since almost nothing is prepared for it.

    Args:
        spec: The store's structure, as last read.

    Raises:
        ClosedError, ForkedClientError: The client cannot be used.
    """
    leaf = spec.tensors_by_path.get(path)
    if leaf is None or leaf.nbytes > MAX_CLONED_BYTES or not _is_read_as_stored(spec, leaf):
        return None
    client.catalog.check_usable()
    movers = client.movers
    store = None if movers is None or client.pool.is_shared else movers.reads.find_known(name, spec)
    return None if store is None or store.compares_rows else _copy_leaf(store, path)


def _is_read_as_stored(spec: Spec, leaf: TensorLeaf) -> bool:
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
