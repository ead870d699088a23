"""Frees, when the server starts, the space of overwritten non-tensor values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tdserve.base.errors import TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.open_store.specs import Specs
from tdserve.store.roots.root import Root
from tdserve.store.values import object_folders

_log = logging.getLogger("tdserve.server")


def compact_all(
    root: Root, specs: Specs, records: Iterable[StoreRecord], is_over: Callable[[], bool] = lambda: False
) -> None:
    """Compacts the values of all stores that may have any. A store that cannot be compacted stays as it is, and is
    logged.

    Call it before any worker starts. Blocks for the disk.

    Args:
        specs: Structures of the stores.
        records: Their records.
        is_over: Called before each store; returns whether the rest stays as it is.
    """
    for record in records:
        if is_over():
            return
        try:
            if record.packed or not KINDS[record.kind].may_have_values(record, specs):
                continue
            num_bytes = object_folders.compact(root.store_folder(record.name), record.uid)
        except TDServeError as error:  # requests for this store report it again
            _log.warning("store %r: its non-tensor values were not compacted: %s", record.name, error)
        else:
            if num_bytes:
                _log.info("store %r: %d bytes of its non-tensor values were given back", record.name, num_bytes)
