"""Creation of replay tables and queues."""

from __future__ import annotations

from typing import Any

from tdserve.base.errors import InvalidRequestError, NotSupportedError, StoreExistsError
from tdserve.base.ids import check_store_name
from tdserve.client.session.catalog.description import StoreDescription, check_storage
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import create_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.captures.declaring import Declared, declare_ragged, is_widened
from tdserve.structure.captures.fake_tensors import to_structure_capture
from tdserve.structure.trees.matching import quote
from tdserve.v1 import control_pb2


def capture_row(client: SessionClient, name: str, like: Any) -> Captured:
    """Captures a row whose content does not matter.

    Raises:
        NotSupportedError: Rows of a table cannot be like this.
    """
    captured = to_structure_capture(
        capture(like, store=check_store_name(name), allow_pickle=client.allow_pickle, takes_structure=True)
    )
    for path, leaf in captured.spec.values:
        if leaf.is_unbatched:
            reason = "all rows share it; put it into a store of its own"
            raise NotSupportedError(feature=f"an UnbatchedTensor at key {quote(path)} of table {name!r}", reason=reason)
    return captured


def create_table(
    client: SessionClient,
    name: str,
    like: Any,
    capacity: int,
    settings: Settings,
    options: StoreOptions,
    ragged: Declared,
) -> StoreDescription:
    """Creates a table of rows like ``like``; arguments and errors as in ``Client.create_replay``."""
    settings.check(capacity)
    if like is None:
        raise InvalidRequestError(argument="like", reason="None is not a tensordict")
    captured = capture_row(client, name, like)
    spec = declare_ragged(captured.spec, captured.values, ragged, store=name)
    for key in settings.sampler.trajectory_keys:
        spec.find(key, store=name)
    request = options.make_message(name, spec, control_pb2.STORE_KIND_REPLAY)
    request.capacity, request.settings = capacity, settings.to_json()
    try:
        return create_store(client, request, spec)[0]
    except StoreExistsError:
        # Rows of another size may have been written since another client created it with the same row.
        found = client.catalog.describe(name, timeout_s=0) if options.exists_ok else None
        is_same = found is not None and (found.settings, found.capacity) == (request.settings, capacity)
        if found is None or not is_same or not is_widened(spec, found.spec):
            raise
        check_storage(found, request)
        return found
