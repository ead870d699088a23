"""The data that an extend has for its rows beside their content: priorities, ends of trajectories, written leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.long_lists import find_columns, read_list
from tdserve.messages.row_numbers import decode_column
from tdserve.rules.replay.plans import Arrival, check_priorities
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.rule_keys import Buffer, name_group_column, to_bools, to_ids
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2


@dataclass(frozen=True)
class ExtendColumns:
    """The data that an extend has for its rows, before their content has arrived.

    Attributes:
        arrival: The rows' data in the request, except the versions.
        num_rows: Number of the rows.
        versions: Policy versions that made the rows, one per row; None if the request has none.
        version_range: Lowest and highest of these versions.
    """

    arrival: Arrival
    num_rows: int
    versions: NDArray[np.int64] | None = None
    version_range: tuple[int, int] = (0, 0)

    def make_arrival(self, store: OpenedStore, found: Mapping[Path, Buffer]) -> Arrival:
        """Returns the rows' data, with the columns found in their content, by path."""
        if not found and not store.group_keys:
            return self.arrival
        sampler = store.get_table().settings.sampler
        ends, ids = self.arrival.ends, None
        for path in sampler.trajectory_keys:
            if sampler.marks_ends:
                flags = to_bools(found[path], self.num_rows)
                ends = flags if ends is None else ends | flags
            else:
                ids = to_ids(found[path], self.num_rows)
        groups = {
            name_group_column(path): to_ids(found[path], self.num_rows) for path in store.group_keys if path in found
        }
        return replace(self.arrival, ends=ends, ids=ids, groups=groups)


def decode_extend_columns(store: OpenedStore, client_id: bytes, asked: control_pb2.ExtendRequest) -> ExtendColumns:
    """Returns the data that an extend has for its rows.

    Raises:
        InvalidRequestError: A column has neither one entry nor one per row, a priority is invalid, or a leaf that the
            table's rules need is missing.
        KeyNotFoundError: The request names a leaf that the table does not have.
    """
    num_rows = asked.num_rows
    table = store.get_table()
    if not (asked.keys or find_columns(asked)) and table.columns.trajectories is None:
        return ExtendColumns(Arrival(writer=client_id), num_rows)
    ends = None
    if asked.HasField("ends"):
        ends = decode_column("ends", read_list(asked.ends), "?", num_rows)
    priorities = None
    if asked.HasField("priorities"):
        table.settings.check_uses_priority(store.name)
        content = read_list(asked.priorities)
        priorities = decode_column("priority", content, "<f8", num_rows)
        check_priorities(np.frombuffer(content, "<f8"))  # one entry for all rows may stand for very many
    keys = store.choose_numbers([tuple(key.parts) for key in asked.keys])
    missing = [path for path in store.rule_keys if keys is not None and not set(store.find_numbers(path)) <= set(keys)]
    if missing:
        reason = f"table {store.name!r} orders its rows by {'.'.join(missing[0])!r}: every row must have it"
        raise InvalidRequestError(argument="batch", reason=reason)
    # Where rows may be claimed, which stream of a client has written them is not on record.
    writer = client_id if table.columns.trajectories is None else (client_id, asked.writer)
    columns = ExtendColumns(Arrival(priorities=priorities, writer=writer, ends=ends, keys=keys), num_rows)
    if not asked.HasField("policy_versions"):
        return columns
    content = read_list(asked.policy_versions)
    versions = decode_column("policy_version", content, "<i8", num_rows)
    each = np.frombuffer(content, "<i8")
    return replace(columns, versions=versions, version_range=(int(each.min(initial=0)), int(each.max(initial=0))))
