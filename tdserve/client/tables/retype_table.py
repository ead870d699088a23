"""Recreates a table that was created for rows of fixed size when its first rows differ in size.

This is possible only before the first row is written. It lets a user pass any row of a ragged batch as ``like``.
"""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError, StoreNotCreatedError, StoreNotFoundError, TDServeError
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import create_store
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import is_widened, widen_row
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import Form
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

RENEWAL_TIMEOUT_S = 1.0
"""Longest time between the end of the old table and the new one: a table of many GiB takes some time."""


def retype(
    client: SessionClient, name: str, row: Spec, batch: Any, deadline: Deadline, *, kind: str
) -> StoreDescription | None:
    """Recreates an empty table for rows like those of a batch.

    Args:
        client: Its connection.
        name: Name of the table.
        row: The structure of its rows, as the caller last read it.
        batch: The rows that do not fit.
        deadline: Deadline of the call.
        kind: The kind that the table is shown as.

    Returns:
        The table's description, for rows that may fit now; None if it is what the caller has already.

    Raises:
        WrongStateError: A store of another kind has its name.
    """
    found = find_current_description(client, name, row, deadline, kind=kind)
    if found is not None:
        return found
    spec = widen_row(row, capture(batch, store=name, allow_pickle=client.allow_pickle))
    description = client.catalog.describe_existing(name, deadline).check_kind(kind)
    if spec is None or description.inserts or description.reserved_rows:
        return None
    request = control_pb2.CreateStoreRequest(
        name=name,
        kind=control_pb2.STORE_KIND_REPLAY,
        spec=codec.encode(spec),
        capacity=description.capacity,
        settings=description.settings,
        max_object_bytes=description.max_object_bytes,
        durability=description.durability,
        checksum=description.checksum,
        replaces_empty_uid=description.uid,
    )
    try:
        create_store(client, request, spec, deadline)
    except (StoreExistsError, StoreNotFoundError):
        return find_current_description(client, name, row, deadline, kind=kind)  # another client was faster
    return client.catalog.describe_existing(name, deadline)


def was_densified(batch: Any, taken: Spec) -> bool:
    """Returns whether nested tensors of a batch, all of one length, were captured as dense ones.

    Args:
        batch: Rows.
        taken: Their structure, as captured for the table.
    """
    dense = {path for path, _ in taken.tensors}
    found = capture(batch, allow_pickle=True).spec.values if dense else ()
    forms = (Form.JAGGED, Form.NESTED)
    return any(path in dense and leaf.ragged is not None and leaf.ragged.form in forms for path, leaf in found)


def find_current_description(
    client: SessionClient, name: str, row: Spec, deadline: Deadline, *, kind: str
) -> StoreDescription | None:
    """Returns the description of a table that was recreated for rows that differ; None if it was not.

    Args:
        kind: The kind that the table is shown as.

    Raises:
        StoreNotFoundError: There is no such table.
        WrongStateError: A store of another kind has its name.
    """
    try:
        description = client.catalog.describe_existing(name, deadline)
    except StoreNotFoundError:
        description = _await_renewal(client, name, deadline)
    description.check_kind(kind)
    return description if description.spec != row and is_widened(row, description.spec) else None


def _await_renewal(client: SessionClient, name: str, deadline: Deadline) -> StoreDescription:
    try:
        return client.catalog.describe_awaited(name, deadline.shorten(RENEWAL_TIMEOUT_S))
    except StoreNotCreatedError as error:
        raise StoreNotFoundError(name=name) from error
    except TDServeError as error:
        if not may_repeat(error, deadline):
            raise
        return client.catalog.describe_existing(name, deadline)
