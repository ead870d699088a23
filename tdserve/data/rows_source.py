"""Source of selected rows of a mapped store; after the copy it checks whether rows are torn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.content import ReadStatus, make_status_column, mark_torn
from tdserve.messages.layout import Layout
from tdserve.rules.replay.allocation.shared_numbers import FoundRows
from tdserve.transport.sources_sinks import RowBuffers


def make_rows_source(
    store: MappedStore,
    layout: Layout,
    found: FoundRows,
    added: Mapping[str, bytes],
) -> RowBuffers:
    """Returns a source of rows with their numbers and generations, and the columns of a table; torn rows are
    marked: those that were overwritten during the copy.

    Args:
        layout: What ``content.make_rows_layout`` returns.
        found: The rows.
        added: The table's columns, by name.

    Raises:
        DamagedRowError: One is damaged, of a table with ``checksum=True``.
    """
    store.compare_rows(found.rows)

    def make_columns() -> list[NDArray[Any]]:
        generations = found.read_again(store.row_generations, store.shared)
        num_torn = mark_torn(generations, found.generations)
        columns = [np.frombuffer(column, np.uint8) for column in added.values()]
        return [found.rows, generations, *columns, make_status_column(ReadStatus.WHOLE, num_torn=num_torn)]

    return RowBuffers(layout, store.get_tables(layout), found.rows, make_columns)
