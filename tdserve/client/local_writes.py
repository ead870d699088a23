"""Content written in place by a local client: into rows that the server has reserved for it, or let it overwrite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tdserve.client.leaves import contents_of
from tdserve.client.local import LocalEnd
from tdserve.data.opened import OpenStore
from tdserve.row_numbers import decode_rows
from tdserve.selection import Selection
from tdserve.selection_torch import to_torch_index
from tdserve.spec.capture import Captured
from tdserve.spec.torch_types import indexable
from tdserve.store.versions import VersionFile, version_layout
from tdserve.transport.ends import as_bytes, copy_bytes
from tdserve.v1 import control_pb2


def put_rows(store: OpenStore, accepted: control_pb2.Accepted, captured: Sequence[Captured]) -> control_pb2.Written:
    """Fills reserved rows; leaves that the content lacks become zero."""
    rows = decode_rows(accepted.rows)
    given = {path for path, _ in captured[0].spec.tensors}
    first = 0
    for each in captured:
        contents = contents_of(each)
        num_rows = each.spec.batch_size[0]
        own = rows[first : first + num_rows]
        is_run = num_rows > 0 and int(own[-1]) - int(own[0]) == num_rows - 1 and bool((own[1:] > own[:-1]).all())
        for path, content in contents.items():
            table = store.table(path)
            if is_run:
                table[int(own[0]) : int(own[0]) + num_rows] = content.reshape(num_rows, -1)
            elif num_rows:
                table[own] = content.reshape(num_rows, -1)
        first += num_rows
    for path in store.leaves.keys() - given:  # what a row before had there is nobody's business
        store.table(path)[rows] = 0
    columns = [store.table(tuple(key.parts))[rows].tobytes() for key in accepted.columns]
    return control_pb2.Written(columns=columns)


def put_selection(store: OpenStore, selection: Selection, captured: Captured) -> None:
    """Overwrites what a selection means."""
    index = to_torch_index(selection, store.spec.batch_size) if selection.items else ()
    for path, tensor in captured.tensors.items():
        leaf = store.leaves[path]
        if index:
            indexable(leaf)[index] = indexable(tensor.cpu())
        elif tensor.is_contiguous() and tensor.device.type == "cpu":
            copy_bytes(as_bytes(leaf), as_bytes(tensor))
        else:
            leaf.copy_(tensor)


def put_version(local: LocalEnd, accepted: control_pb2.Accepted, captured: Captured, values: bytes) -> None:
    """Makes and seals the file of a version, that nobody sees before the server says so.

    Raises:
        CapacityError: The disk is full; nothing stays behind.
    """
    recycles = local.root / accepted.recycles if accepted.recycles else None
    file = VersionFile.create(local.root / accepted.path, captured.spec, recycles=recycles)
    contents = contents_of(captured)
    pieces = [contents[path] for path, _, _ in version_layout(captured.spec)]
    if pieces:
        np.concatenate(pieces, out=file.content)
    if values:
        file.write_values(values)
    file.seal()
