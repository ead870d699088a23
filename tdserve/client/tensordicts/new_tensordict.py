"""Creation of tensordict stores, of a tensordict or a folder, and writes that replace the whole content of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    NotLocalError,
    SpecMismatchError,
    StoreExistsError,
    StructureChangedError,
)
from tdserve.base.ids import check_store_name
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.catalog.description import check_storage
from tdserve.client.session.requests.known_stores import KnownStore
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import create_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tensordicts.memmap_arguments import check_sizes
from tdserve.client.tensordicts.reading import open_store
from tdserve.client.transfers.write import write_selection
from tdserve.messages.selection.selection import EVERYTHING
from tdserve.rules.catalog import make_identity
from tdserve.rules.channel_transports import LOCAL_TRANSPORT, is_local_allowed
from tdserve.structure.captures.adapting import adapt
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.captures.declaring import (
    Declared,
    declare_ragged,
    list_declared_paths,
    make_first_values,
    make_zeros,
)
from tdserve.structure.captures.fake_tensors import to_meta_capture, to_structure_capture
from tdserve.structure.trees.tree import Path, check_matches
from tdserve.v1 import control_pb2


class NewStore:
    """A store that will be created from a tensordict, which must not change until then.

    Raises:
        NotSupportedError: A leaf cannot be stored.
    """

    def __init__(
        self,
        client: SessionClient,
        name: str,
        td: Any,
        options: StoreOptions,
        batch_size: Sequence[int] | int | None = None,
    ) -> None:
        if isinstance(td, dict):
            td = read_dict(td, batch_size=check_sizes(() if batch_size is None else batch_size), store=name)
        elif batch_size is not None:
            reason = f"a {type(td).__name__} has its own; it is given for a dict of arrays"
            raise InvalidRequestError(argument="batch_size", reason=reason)
        self._client = client
        self._name = name
        self._td = td
        self._options = options
        self._captured = capture(
            td, store=check_store_name(name), allow_pickle=client.allow_pickle, is_exact=True, takes_structure=True
        )

    def fill(self, deadline: Deadline) -> int:
        """Creates the store, writes its content and returns the content version; errors as in ``init_remote``."""
        client, name = self._client, self._name
        blank = to_meta_capture(self._captured, store=name)
        captured = blank or self._captured
        request = self._options.make_message(name, captured.spec, control_pb2.STORE_KIND_TENSORDICT)
        if blank is not None:
            return self._make_blank(request, blank, deadline)
        request.exists_ok = False  # an existing store is written in another way
        try:
            return write_selection(
                client, name, EVERYTHING, captured, stored=captured.spec, new_store=request, deadline=deadline
            )
        except StoreExistsError:
            if not self._options.exists_ok:
                raise
            if request.durability or request.max_object_bytes or request.checksum:
                check_storage(client.catalog.describe_existing(name, deadline), request)
            return replace_content(client, name, captured, self._td, deadline)

    def _make_blank(self, request: control_pb2.CreateStoreRequest, captured: Captured, deadline: Deadline) -> int:
        """Creates a store of meta tensors; only its non-tensor values are written."""
        catalog, stored = self._client.catalog, captured.spec
        try:
            description, _ = create_store(self._client, request, stored, deadline)
        except StoreExistsError:
            if not request.exists_ok:
                raise
            description = catalog.describe_existing(request.name, deadline)  # maybe of the same structure with content
            check_storage(description, request)
            stored = description.spec
            check_matches(stored, captured.spec, store=request.name)
        keys = [path for path, _ in captured.spec.values]
        if not keys:
            return description.version
        content = captured._replace(spec=captured.spec.select(keys))
        return write_selection(
            self._client, request.name, EVERYTHING, content, keys=keys, stored=stored, deadline=deadline
        )


class NewZeros:
    """A store of zeros that will be created with the structure of a tensordict; arguments as in ``memmap_like``."""

    def __init__(
        self,
        client: SessionClient,
        name: str,
        like: Any,
        options: StoreOptions,
        batch_size: Sequence[int] | int,
        ragged: Declared,
    ) -> None:
        self._client = client
        captured = to_structure_capture(
            capture(like, store=name, allow_pickle=client.allow_pickle, takes_structure=True)
        )
        self._values = captured.values
        self._sizes = check_sizes(batch_size)
        has_rows = bool(self._sizes) or ragged is not None  # else it is no row, from which others may differ
        row = declare_ragged(captured.spec, captured.values, ragged, store=name) if has_rows else captured.spec
        known = list_declared_paths(captured.spec, captured.values, ragged) if has_rows else set()
        unknown = [path for path, leaf in row.values if leaf.ragged is not None and path not in known]
        self._zeros: dict[Path, Any] = {}
        if unknown:
            blank = capture(make_zeros(like), store=name, like=row, allow_pickle=client.allow_pickle).values
            self._zeros = {path: blank[path] for path in unknown}
        self._spec = row.prepend(self._sizes) if self._sizes else row
        self._request = options.make_message(check_store_name(name), self._spec, control_pb2.STORE_KIND_TENSORDICT)

    def make(self, deadline: Deadline) -> StoreHandle:
        """Creates the store, writes its non-tensor values and returns its handle; errors as in ``memmap_like``."""
        client, request, spec = self._client, self._request, self._spec
        description, is_new = create_store(client, request, spec, deadline)
        if spec.values and is_new and 0 not in self._sizes:
            keys = [path for path, _ in spec.values]
            values_only, values = make_first_values(spec.select(keys), self._values, self._sizes, self._zeros)
            content = Captured(values_only, {}, values, {})
            write_selection(client, request.name, EVERYTHING, content, keys=keys, stored=spec, deadline=deadline)
        return StoreHandle(client, description)


def adopt_folder(
    client: SessionClient,
    path: str | os.PathLike[str],
    name: str,
    *,
    read_only: bool,
    exists_ok: bool,
    deadline: Deadline,
) -> None:
    """Makes a store of a folder; see ``Client.adopt``.

    Any folder is adopted only for a client whose session has proved that it shares the root. A client with another
    transport proves it by a second session.
    """
    asked = control_pb2.AdoptRequest(
        name=check_store_name(name), path=os.path.abspath(os.fspath(path)), read_only=read_only, exists_ok=exists_ok
    )

    def attempt(session: Session, request: int, deadline: Deadline) -> Any:
        pending = session.send(request, adopt=asked)
        return pending.wait(compute_answer_timeout_s(deadline), f"the adoption of {asked.path!r}")

    if client.session(deadline).local is None and not is_local_allowed(client.transport):
        beside = replace(client.recipe, transport=LOCAL_TRANSPORT, device=None).make()
        try:
            beside.call(attempt, deadline, request=beside.requests.begin_change())
            return
        except NotLocalError:  # the server decides by the path alone
            pass
        finally:
            beside.close()
    client.call(attempt, deadline, request=client.requests.begin_change())


def replace_content(client: SessionClient, name: str, captured: Captured | None, td: Any, deadline: Deadline) -> int:
    """Replaces a store's content as a whole; see ``Client.send``.

    Args:
        captured: The content, captured without knowing the store; None if that is not possible.
        td: The tensordict that it was captured from.
    """
    known = client.known_stores.find(name)
    if known is not None:
        try:
            return _replace_known(client, name, known, captured, td, deadline)
        except SpecMismatchError:  # it may be another store now
            client.known_stores.forget(name)
    while True:
        try:
            found = client.catalog.describe_existing(name, deadline)
            stored = open_store(client, found, "send()").spec
            known = KnownStore(make_identity(found.uid, found.structure), stored, found.share_non_tensor)
            client.known_stores.learn(name, known)
            return _replace_known(client, name, known, captured, td, deadline)
        except StructureChangedError:  # the structure has changed since it was requested
            deadline.raise_if_expired(f"a write to {name!r}, whose keys others keep changing")


def _replace_known(
    client: SessionClient, name: str, known: KnownStore, captured: Captured | None, td: Any, deadline: Deadline
) -> int:
    stored = known.spec
    if captured is None or stored.has_ragged or captured.spec.has_ragged:
        captured = capture(td, store=name, allow_pickle=client.allow_pickle, like=stored, is_exact=True)
    else:
        captured = adapt(captured, stored)
    check_matches(stored, captured.spec, store=name)
    return write_selection(
        client, name, EVERYTHING, captured, stored=stored, identity=known.identity, deadline=deadline
    )
