"""What the figures of a store say."""

from __future__ import annotations

from tdserve.v1 import control_pb2


def find_num_rows(store: control_pb2.StoreFigures) -> int | None:
    """Returns the number of rows; None if it is not known: the store was not used since the server started."""
    return store.description.num_rows if store.is_open or store.description.num_rows else None


def find_version(store: control_pb2.StoreFigures) -> int | None:
    """Returns the version, of weights the newest; None as in ``find_num_rows``."""
    return store.description.version if store.is_open or store.description.version else None
