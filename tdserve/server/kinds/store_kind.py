"""The contract of a kind of store. A new kind is a class in a file beside this one, and a line of ``KINDS``."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol

from tdserve.base.errors import TDServeError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord, check_durability, check_max_object_bytes
from tdserve.rules.weights import STEP_AFTER_LOSS
from tdserve.server.kinds.row_files import make_files
from tdserve.server.mutations.unfinished_writes import UnfinishedWrites
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.server.recovery.lost_rows import list_first
from tdserve.store.database.catalog_db import CatalogDB, Transaction
from tdserve.store.durability.watermark import SyncedStore, Watermark
from tdserve.store.roots.root import Root
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, is_of
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class KindStores(Protocol):
    """What a kind uses of all stores; see the attributes and methods of ``Stores``."""

    root: Root
    db: CatalogDB
    specs: Specs
    unfinished_writes: UnfinishedWrites
    followers: dict[str, set[str]]

    def find(self, name: str) -> OpenedStore | None:
        """Returns the visible store of this name. Raises CorruptDataError."""

    def save_state(self, store: OpenedStore, txn: Transaction, state: object) -> None:
        """Saves what a store's rules need after a restart."""


class StoreKind(ABC):
    """A kind of store. What most kinds have in common is implemented here: rows in files, with generations.

    Attributes:
        name: Its name in the catalog; ``STORE_KIND_NAME`` of the messages.
        has_rules: Whether rules in memory decide what is read and written. A store without them is one tensordict whose
            parts any request may read, write and alter; it may be closed at any time.
        has_versions: Whether its files are versions, the first of which makes it visible, instead of rows.
    """

    name: ClassVar[str]
    has_rules: ClassVar[bool] = True
    has_versions: ClassVar[bool] = False

    # ------------------------------------------------------------ creation

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        """Returns the record of a store that a client asks for.

        Raises:
            InvalidRequestError, InvalidSpecError, KeyNotFoundError, WrongStateError: There can be no such store.
        """
        return StoreRecord(
            name=asked.name,
            kind=self.name,
            uid="",
            fingerprint=spec.fingerprint,
            num_rows=1,
            max_object_bytes=check_max_object_bytes(asked.max_object_bytes),
            durability=check_durability(asked.durability),
            checksum=asked.checksum,
        )

    def make_stored_spec(self, record: StoreRecord, spec: Spec) -> Spec:
        """Returns the structure on disk. Raises InvalidSpecError if this kind cannot have such a structure."""
        return spec

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        """Returns whether the files of a new store may wait for its first use."""
        return False

    async def make_files(
        self, folder: FilePath, stored: Spec, record: StoreRecord, adopted: Adopted | None
    ) -> list[str]:
        """Creates the files of a store; arguments and result as in ``row_files.make_files``."""
        return await asyncio.to_thread(make_files, folder, stored, record, adopted)

    # ------------------------------------------------------------ opening

    @abstractmethod
    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        """Opens a store.

        Args:
            checks: Whether to check the user's folder of an adopted store too.

        Raises:
            CorruptDataError: Its files are damaged.
        """

    def is_long_to_open(self, record: StoreRecord) -> bool:
        """Returns whether opening this store takes so long that a thread should do it."""
        return False

    def split_opening(
        self, record: StoreRecord, stores: KindStores
    ) -> tuple[Callable[[], Any], Callable[[Any], OpenedStore]]:
        """Returns two functions: one restores a store's rules, in any thread, the other opens it with them.
        Raises CorruptDataError."""
        return lambda: None, lambda _: self.open(record, stores)

    # ------------------------------------------------------------ moving

    def find_obstacle(self, record: StoreRecord) -> str:
        """Returns why a store cannot move to another server; "" if it can."""
        return f"its tensors lie in {record.adopted}" if record.adopted else ""

    def arrive(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state that a store has on the server to which it has moved, without stores that it depends on."""
        return state

    def begin_copy(self, folder: FilePath, record: StoreRecord, state: dict[str, Any], db: CatalogDB) -> dict[str, Any]:
        """Makes a copy, such as one in a checkpoint, differ from what the clients of the original may know.

        Args:
            folder: Its files, which no process has open.
            record: Its own.
            state: State of the original.

        Returns:
            The state of the copy.
        """
        return state

    def get_state(self, store: OpenedStore) -> dict[str, Any]:
        """Returns what the rules of a store need after a restart, or on another server."""
        return {}

    def rename_orders(self, state: dict[str, Any], names: Mapping[tuple[bytes, str], str]) -> dict[str, Any]:
        """Returns the state with other names of the orders of keys; see ``Specs.learn``.

        Args:
            names: By fingerprint and earlier name.
        """
        return state

    def find_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        """Returns the last version that any client may know of a store, which is being deleted or leaves; 0 for a kind
        without versions whose order counts."""
        try:
            return self.read_last_version(store, db)
        except TDServeError:  # it is damaged
            return store.record.former_version + STEP_AFTER_LOSS

    def read_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        """As ``find_last_version``. Raises CorruptDataError if the version cannot be read."""
        return 0

    # ------------------------------------------------------------ description

    def describe(self, store: OpenedStore, stores: KindStores, description: control_pb2.StoreDescription) -> None:
        """Adds to the description of a store what it holds now."""
        description.num_rows, description.version = store.spec.num_rows, store.content_version
        lost = self.find_lost(store)
        description.num_damaged = len(lost)
        description.damaged_rows.extend(list_first(lost))

    def find_lost(self, store: OpenedStore) -> RowSet:
        """Returns the rows of a store that cannot be read until they are written again."""
        return store.lost.row_set

    def describe_packed(self, record: StoreRecord, description: control_pb2.StoreDescription) -> None:
        """Adds to the description of a store that was never used what it would hold."""
        description.num_rows = record.num_rows

    def observe(self, store: OpenedStore, figures: control_pb2.StoreFigures) -> None:  # noqa: B027 (most have none)
        """Adds to the figures of a store those that only its kind has."""

    # ------------------------------------------------------------ repair

    def may_have_values(self, record: StoreRecord, specs: Specs) -> bool:
        """Returns whether its folder may have a file of values, which is compacted when the server starts."""
        return bool(specs.get(record.fingerprint, record.order).values)

    def is_folder_of(self, folder: FilePath, record: StoreRecord) -> bool:
        """Returns whether a folder belongs to this incarnation of the store; some of its files may be missing."""
        path = folder / GENERATION_FILE
        return is_of(path, uid=record.uid) if path.exists() and path.stat().st_size else folder.exists()

    def has_synced_changes(self, store: SyncedStore, *, first: int) -> bool:
        """Returns whether a completed pass has covered anything later than the first content of a store.

        Args:
            first: Largest generation of that content.

        Raises:
            CorruptDataError: No pass has covered its files.
        """
        return int(Watermark.open(store, makes=False).generations.max()) > first

    @abstractmethod
    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        """Repairs a store after a loss of power, as often as it takes.

        Returns:
            What was lost, with its number; "" for nothing.

        Raises:
            TDServeError: It cannot be repaired now.
        """


def load_state(db: CatalogDB, uid: str) -> dict[str, Any]:
    """Returns what the rules of a store have saved; nothing if they have not yet."""
    content = db.get("states", uid.encode())
    state: dict[str, Any] = json.loads(content) if content else {}
    return state
