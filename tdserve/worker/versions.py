"""Published versions: received straight into their file's mapping, sent straight from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.content import ReadStatus, read_layout, status_column, write_layout
from tdserve.store.version_ends import VersionEnd
from tdserve.store.versions import VersionFile
from tdserve.structure.dtypes import NAMES
from tdserve.structure.torch_types import to_torch
from tdserve.structure.version_subset import converted, decode_numbers, only_leaves
from tdserve.transport.sources_sinks import IndexedEnd, Source, Trailing
from tdserve.v1 import worker_pb2
from tdserve.worker.lane import Lane
from tdserve.worker.transfers import answer, take


def receive_version(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Fills a version's file and seals it; nobody sees it before control says so.

    Raises:
        CapacityError: The disk is full; nothing stays behind.
    """
    wanted = order.receive_version
    spec = lane.surroundings.stores.spec(wanted.version.fingerprint)
    file = VersionFile.create(wanted.version.path, spec, recycles=wanted.version.recycles or None)
    layout = write_layout(spec, is_packed=True)
    worked = take(lane, order, wanted.content, layout, VersionEnd(file.content, spec, spec, layout))
    if wanted.content.values:
        file.write_values(wanted.content.values)
    file.seal()
    return worked


def send_version(lane: Lane, order: worker_pb2.Order) -> worker_pb2.Worked:
    """Sends a version's leaves from where they lie, or converted; control keeps the file from being recycled
    meanwhile."""
    wanted = order.send_version
    spec = lane.surroundings.stores.spec(wanted.version.fingerprint)
    sent = converted(spec, NAMES.get(wanted.dtype, ""))
    is_converted = sent is not spec
    if wanted.HasField("leaves"):
        sent = only_leaves(sent, decode_numbers(wanted.leaves, spec))
    layout = read_layout(sent, is_packed=True)
    with VersionFile.open(wanted.version.path, spec) as file:
        slots = layout.slots[: layout.num_leaves]
        values = file.read_values() or b"" if spec.values else b""
        source: Source
        if is_converted:
            source = IndexedEnd(
                layout, lambda slot: file.leaves[slots[slot].path].to(to_torch(slots[slot].dtype)), _whole
            )
        else:
            source = VersionEnd(file.content, spec, sent, layout, Trailing(layout, _whole).column)
        inline, tells_of_others = wanted.inline, False  # a version's file does not change while it is sent
        return answer(lane, order, layout, source, values=values, inline=inline, tells_of_others=tells_of_others)


def _whole() -> list[NDArray[np.int64]]:
    return [status_column(ReadStatus.WHOLE)]
