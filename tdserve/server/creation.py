"""Creating and deleting stores on request."""

from __future__ import annotations

from collections.abc import Container

from tdserve.catalog import StoreKind, StoreRecord, checked_max_object_bytes
from tdserve.deadline import Deadline
from tdserve.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSpecError,
    KeyNotFoundError,
    StoreExistsError,
    TransferAbortedError,
)
from tdserve.ids import check_store_name
from tdserve.replay.settings import Settings
from tdserve.server import descriptions
from tdserve.server.stores import Stores
from tdserve.server.tables.policies import check_policy, wake_followers
from tdserve.spec import codec
from tdserve.spec.tree import Spec
from tdserve.v1 import control_pb2

KIND_NAMES: dict[int, StoreKind] = {
    control_pb2.STORE_KIND_TENSORDICT: "tensordict",
    control_pb2.STORE_KIND_REPLAY: "replay",
    control_pb2.STORE_KIND_WEIGHTS: "weights",
}

MAX_CAPACITY_ROWS = 2**40

CREATION_TIMEOUT_S = 60.0
"""Reserving space takes up to 0.4 s per GiB."""


class Creation:
    """Makes stores and removes them.

    Args:
        stores: The book.
        sessions: Numbers of those that are open: with one a store that it did not fill goes.
    """

    def __init__(self, stores: Stores, sessions: Container[object]) -> None:
        self._stores = stores
        self._sessions = sessions

    async def create(self, request: control_pb2.CreateStoreRequest) -> control_pb2.CreateStoreResponse:
        """Creates a store, or finds the one that ``exists_ok`` accepts.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        name = check_store_name(request.name)
        kind = KIND_NAMES.get(request.kind)
        if kind is None:
            raise InvalidRequestError(argument="kind", reason=f"{request.kind} is no kind of store")
        if not request.HasField("spec"):
            raise InvalidSpecError(store=name, reason="there is none")
        spec = codec.decode(request.spec)
        record = _record(name, kind, spec, request)
        if kind == "replay":
            check_policy(self._stores, record)
        if request.replaces_empty_uid:
            await self._make_way(name, request.replaces_empty_uid)
        existing = self._stores.existing_or_refuse(name, record, exists_ok=request.exists_ok)
        if request.loading and self._stores.is_loading(name, request.session, spec):
            existing = self._stores.get_loading(name, request.session)  # asked again: the answer was lost
        created = existing is None
        if existing is None:
            try:
                existing = await self._stores.create(record, spec, owner_session=request.session)
            except StoreExistsError:
                if not request.exists_ok:
                    raise
                # Somebody is quicker, and may still be making its files, or may give up.
                await self._stores.wait_settled(name, Deadline.after(CREATION_TIMEOUT_S))
                return await self.create(request)
            if request.loading and request.session not in self._sessions:
                await self._stores.delete(existing)  # its session ended meanwhile, and will not be back for it
                raise TransferAbortedError(transfer=0, reason=f"session {request.session} has ended")
        description = descriptions.describe(self._stores, existing, with_spec=False)
        return control_pb2.CreateStoreResponse(description=description, created=created)

    async def _make_way(self, name: str, uid: str) -> None:
        """Deletes a replay that nobody has written to.

        Raises:
            StoreExistsError: Somebody has, or it is another one by now. Nothing was changed.
            StoreNotFoundError: There is none.
        """
        entry = self._stores.get(name)
        table = None if entry.table is None else entry.replay_table()
        if entry.record.uid != uid or table is None or table.ring.inserts or table.ring.num_reserved:
            raise StoreExistsError(name=name, reason="rows were written to it, or it was made anew")
        await self.delete(name)

    async def delete(self, name: str) -> None:
        """Deletes a store, a damaged one too; of an adopted one the user's folder stays. Raises StoreNotFoundError."""
        try:
            entry = self._stores.get(check_store_name(name))
        except CorruptDataError:
            entry = self._stores.damaged(name)
        await self._stores.delete(entry)
        wake_followers(self._stores, entry.name)

    async def abandon(self, session: int) -> None:
        """Removes stores whose first content will never be whole: their session has ended."""
        for entry in self._stores.loading_of(session):
            await self._stores.delete(entry)


def _record(name: str, kind: StoreKind, spec: Spec, request: control_pb2.CreateStoreRequest) -> StoreRecord:
    if kind != "replay":
        num_rows = spec.batch_size[0] if spec.batch_size and kind == "tensordict" else 1
        return StoreRecord(
            name=name,
            kind=kind,
            uid="",
            fingerprint=spec.fingerprint,
            num_rows=num_rows,
            loading=request.loading,
            share_non_tensor=request.share_non_tensor and kind == "tensordict",
            max_object_bytes=checked_max_object_bytes(request.max_object_bytes),
        )
    if not 1 <= request.capacity <= MAX_CAPACITY_ROWS:
        raise InvalidRequestError(
            argument="capacity", reason=f"{request.capacity} is not from 1 to {MAX_CAPACITY_ROWS}"
        )
    settings = Settings.from_json(request.settings, min_size=request.min_size or 1)
    settings.check(request.capacity)
    for key in settings.rule_keys:
        if key not in dict(spec.tensors):
            raise KeyNotFoundError(store=name, key=".".join(key))
    return StoreRecord(
        name=name,
        kind=kind,
        uid="",
        fingerprint=spec.fingerprint,
        num_rows=request.capacity,
        capacity=request.capacity,
        settings=settings.to_json(),
        max_object_bytes=checked_max_object_bytes(request.max_object_bytes),
    )
