"""Published versions: received straight into their file's mapping, sent straight from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.content import ReadStatus, read_layout, status_column, write_layout
from tdserve.store.versions import VersionFile
from tdserve.transport.ends import LeafEnd, Trailing
from tdserve.v1 import worker_pb2
from tdserve.worker.session import WorkerSession
from tdserve.worker.transfers import answer, take


def receive_version(session: WorkerSession, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Fills a version's file and seals it; nobody sees it before control says so.

    Raises:
        CapacityError: The disk is full; nothing stays behind.
    """
    wanted = order.receive_version
    spec = session.surroundings.stores.spec(wanted.version.fingerprint)
    file = VersionFile.create(wanted.version.path, spec, recycles=wanted.version.recycles or None)
    layout = write_layout(spec, is_packed=True)
    worked = take(session, order, wanted.content, layout, LeafEnd([file.leaves[slot.path] for slot in layout.slots]))
    if wanted.content.values:
        file.write_values(wanted.content.values)
    file.seal()
    return worked


def send_version(session: WorkerSession, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends a version's leaves from where they lie; control keeps the file from being recycled meanwhile."""
    wanted = order.send_version
    spec = session.surroundings.stores.spec(wanted.version.fingerprint)
    layout = read_layout(spec, is_packed=True)
    with VersionFile.open(wanted.version.path, spec) as file:
        leaves = [file.leaves[slot.path] for slot in layout.slots[: layout.num_leaves]]
        values = file.read_values() or b"" if spec.values else b""
        source = LeafEnd(leaves, Trailing(layout, _whole))
        return answer(session, order, layout, source, values=values, inline=wanted.inline)


def _whole() -> list[NDArray[np.int64]]:
    return [status_column(ReadStatus.WHOLE)]
