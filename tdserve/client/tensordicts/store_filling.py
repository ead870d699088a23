"""A new tensordict store whose rows are written in several parts, and that others see only when it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.base.errors import (
    DeadlineExceededError,
    StoreNotFoundError,
    StructureChangedError,
    TDServeError,
    TransferAbortedError,
    TransportError,
    WrongStateError,
)
from tdserve.base.ids import check_store_name, make_uid
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.session.session_client import SessionClient
from tdserve.client.session.store_changes import create_store, end_filling
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.transfers.write import write_selection
from tdserve.messages.selection.selection import encode
from tdserve.rules.catalog import make_identity
from tdserve.structure.captures.array_dicts import read_dict
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import check_matches
from tdserve.v1 import control_pb2

_MIN_CREATION_S = 60.0
_CREATION_S_PER_GIB = 1.0
"""Reserving space takes up to 0.4 s per GiB."""


class StoreFilling:
    """Fills a new store with consecutive rows; ``show`` makes it visible, ``give_up`` deletes it.

    Others do not see it before, but its name is taken. If the connection is lost before ``show``, or this process ends,
    nothing of it is left. Threads: one at a time.

    Args:
        client: The client that writes.
        name: Name of the store.
        num_rows: Size of its first batch dimension, at least 1.
        options: How it is created; ``exists_ok`` must be False.
    """

    def __init__(self, client: SessionClient, name: str, num_rows: int, options: StoreOptions) -> None:
        self._client = client
        self._name = check_store_name(name)
        self._num_rows = num_rows
        self._options = options
        self._identity = ""
        self._filling = make_uid()
        self._may_be_there = False
        self._description: Any = None
        self.num_written = 0

    def write(self, rows: Any, batch_size: Sequence[int]) -> None:
        """Writes the next rows; the first ones decide about the structure of the store, which they create.

        Args:
            rows: A tensordict, or a dict as for ``read_dict`` with this batch size.
            batch_size: Their number, first, and further dimensions.

        Raises:
            StoreExistsError, CapacityError, NotSupportedError: Of the first rows; nothing was created.
            SpecMismatchError: They have another structure than the first ones; they were not written.
            TransferAbortedError: The connection was lost. Nothing of the store is left.
        """
        client, name = self._client, self._name
        if isinstance(rows, dict):
            rows = read_dict(rows, batch_size=batch_size, store=name, declares=True)
        if self._description is None:
            self._create(rows)
        stored = self._description.spec
        captured = capture(rows, store=name, allow_pickle=client.allow_pickle, like=stored)
        start, stop = self.num_written, self.num_written + captured.spec.batch_size[0]
        if stop > self._num_rows:
            raise WrongStateError(state=f"store {name!r} has {self._num_rows} rows", event=f"writing row {stop - 1}")
        check_matches(stored.with_rows(stop - start), captured.spec, store=name)
        selection = encode(slice(start, stop), batch_size=stored.batch_size, store=name)
        try:
            write_selection(
                client,
                name,
                selection,
                captured,
                stored=stored,
                identity=self._identity,
                deadline=client.make_deadline(None),
            )
        except (StoreNotFoundError, StructureChangedError) as error:
            raise self._make_loss(error) from error
        self.num_written = stop

    def _create(self, rows: Any) -> None:
        client, name = self._client, self._name
        first = capture(rows, store=name, allow_pickle=client.allow_pickle)
        spec = first.spec.with_rows(self._num_rows)
        request = self._options.make_message(name, spec, control_pb2.STORE_KIND_TENSORDICT)
        request.is_hidden, request.filling = True, self._filling
        creation_s = _MIN_CREATION_S + _CREATION_S_PER_GIB * spec.nbytes / 2**30
        deadline = client.make_deadline(max(client.catalog.timeout_s, creation_s))
        self._may_be_there = True  # also if no answer comes, as after an interrupt
        try:
            self._description, _ = create_store(client, request, spec, deadline)
        except TDServeError as error:
            self._may_be_there = isinstance(error, (TransportError, DeadlineExceededError))
            raise
        self._identity = make_identity(self._description.uid, self._description.structure)

    def show(self) -> StoreHandle:
        """Makes the store visible to all, and returns its handle.

        Raises:
            WrongStateError: Rows are missing.
            TransferAbortedError: The connection was lost. Nothing of the store is left.
        """
        if self.num_written < self._num_rows:
            state = f"{self.num_written} of {self._num_rows} rows were written"
            raise WrongStateError(state=state, event=f"making store {self._name!r} visible")
        try:
            end_filling(self._client, self._name, self._identity)
        except StoreNotFoundError as error:
            raise self._make_loss(error) from error
        description, self._description, self._may_be_there = self._description, None, False
        return StoreHandle(self._client, description)

    def give_up(self) -> None:
        """Deletes the store if it was begun and is not visible yet."""
        if not self._may_be_there:
            return
        self._description, self._may_be_there = None, False
        try:
            end_filling(self._client, self._name, self._identity, filling=self._filling, gives_up=True)
        except StoreNotFoundError:  # the connection was lost
            return

    def _make_loss(self, error: Exception) -> TransferAbortedError:
        reason = f"the connection was lost while store {self._name!r} was filled; nothing of it is left ({error})"
        return TransferAbortedError(transfer=0, reason=reason)
