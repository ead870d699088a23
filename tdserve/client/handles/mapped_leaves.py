"""Mapped leaves of a store, for a client on the server's machine."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.read_content import on_cpu
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.session.calls import SessionClient
from tdserve.client.session.session import Session
from tdserve.client.session.timeouts import compute_answer_timeout_s
from tdserve.data.values import ReadBlock, read_block
from tdserve.store.mapping import open_leaves
from tdserve.structure import codec
from tdserve.structure.build import build
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2


def map_store(client: SessionClient, name: str, spec: Spec, *, writable: bool, deadline: Deadline) -> Any:
    """Maps the store's files as a locked tensordict; see ``StoreHandle.map``."""
    check_real("mapping a store")

    def attempt(session: Session, request: int, deadline: Deadline) -> Any:
        session.mover.check_maps(f"mapping store {name!r}", writable=writable)
        asked = control_pb2.ReadRequest(store=name, fingerprint=spec.fingerprint, timeout_s=deadline.remaining_s)
        pending = session.send(request, read=asked)
        accepted = pending.wait(compute_answer_timeout_s(deadline), f"a read of {name!r}").done.accepted
        stored = codec.decode(accepted.spec) if accepted.HasField("spec") else spec
        store = session.mover.open_mapped(name, stored, accepted)
        if writable:
            store.check_writable()
        values: bytes | ReadBlock = accepted.values
        if stored.values and not values:
            values = read_block(store, [path for path, _ in stored.values], None)
        found, decoded = decode_values(on_cpu(stored), values)
        leaves = open_leaves(store.folder, stored, writable=writable, is_private=not writable)
        store.check_current()
        return build(found, leaves, decoded).lock_()

    return client.call(attempt, deadline)
