"""What moves a session's content: its data worker, or the local client itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tdserve.base.deadline import Deadline
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.weights import UnfinishedVersion, VersionRecord
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.server.processes.claim_holder import ClaimHolder
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2, worker_pb2

MAX_REPORTED_BYTES = 1 << 18
"""Most bytes of rows that are reported with the end of a write: control's event loop reads a report at once."""


@dataclass(frozen=True)
class RowsToFill:
    """Reserved rows of a table.

    Attributes:
        store: The table.
        reservation: The rows.
        asked: The request that brings their content.
    """

    store: OpenedStore
    reservation: Reservation
    asked: control_pb2.ExtendRequest

    @cached_property
    def rule_leaves(self) -> list[Path]:
        """Paths of the tensor leaves whose bytes the table's rules need."""
        return [path for path in self.store.rule_keys if path in self.store.spec.tensors_by_path]

    @cached_property
    def columns(self) -> list[Path]:
        """Those whose bytes are reported with the end of the write: all, or none if they are too long for that."""
        spec = self.store.spec
        capacity_nbytes = sum(spec.tensors_by_path[path].nbytes for path in self.rule_leaves)
        is_short = capacity_nbytes * len(self.reservation) <= MAX_REPORTED_BYTES * spec.batch_size[0]
        return self.rule_leaves if is_short else []

    def name_columns(self, contents: Sequence[bytes]) -> dict[Path, bytes]:
        """Maps the paths in ``columns`` to their contents."""
        return dict(zip(self.columns, contents, strict=True))


@dataclass(frozen=True)
class RowsToSend:
    """Rows of a table to be sent to a client.

    Attributes:
        store: The table.
        plan: The rows.
        accepted: The answer so far; sending fills in the rest. None if the client waits for content only.
        keys: The leaves or nodes to send; empty: all.
    """

    store: OpenedStore
    plan: RowsPlan
    accepted: control_pb2.Accepted | None
    keys: Sequence[content_pb2.Path] = ()


@dataclass(frozen=True)
class VersionToSend:
    """A version of weights to be sent to a client.

    Attributes:
        store: The store.
        record: Record of the version.
        asked: The client's request.
        deadline: Deadline of the request.
    """

    store: OpenedStore
    record: VersionRecord
    asked: control_pb2.LatestRequest
    deadline: Deadline


@dataclass(frozen=True)
class StoreToFill:
    """A store that is not visible to clients yet.

    Attributes:
        name: Name of the store, for errors.
        uid: Its incarnation.
        ref: Returns the reference to the store for orders to a worker.
        spool: File that takes values that arrive over the channel.
        path: Path below the root, if it does not follow from the name.
    """

    name: str
    uid: str
    ref: Callable[[WorkerSpecCache], worker_pb2.StoreRef]
    spool: str
    path: str = ""


class Mover(ABC):
    """The server's end of what moves some of a session's content. No other part asks for its kind.

    Attributes:
        transport: Transport of the content, by its public name.
        uses_channels: Whether content and mail move over channels between the client and its worker.
        lock_name: File that the client holds for as long as it may write the stores' files; "" when it never does.
    """

    transport: str
    uses_channels = False
    lock_name = ""

    @property
    def claim_holder(self) -> ClaimHolder | None:
        """The process that fills the rows of this session's extends, if it may claim rows."""
        return None

    @abstractmethod
    def take_claim(self, store: OpenedStore, grant: Callable[[], control_pb2.Claim | None]) -> control_pb2.Claim | None:
        """Lets the holder use a claim, once it can. Returns the claim if the client gets it with its answer.

        Args:
            grant: Makes the claim; None if there can be none now.
        """

    @abstractmethod
    async def put_rows(self, request: int, rows: RowsToFill) -> dict[Path, bytes]:
        """Fills reserved rows; returns the columns that the table's rules need. ``forget_rows`` or ``give_up_rows``
        follows.

        Raises:
            TDServeError: The rows were not filled.
        """

    def forget_rows(self, rows: RowsToFill, txn: Transaction) -> None:  # noqa: B027 (most have nothing to do)
        """Deletes the record of who fills these rows: this transaction commits them."""

    def give_up_rows(self, request: int, rows: RowsToFill) -> None:
        """Frees rows that were not filled or are not needed. They cannot be written any more."""
        rows.store.get_table().ring.abort(rows.reservation)
        rows.store.waiters.wake()

    @abstractmethod
    async def get_rows(self, request: int, rows: RowsToSend) -> control_pb2.Done | None:
        """Sends rows of a table to the client.

        Returns:
            The answer; None when the client has it already, and the content follows over the channel.
        """

    @abstractmethod
    async def fill(self, request: int, store: StoreToFill, content: control_pb2.Content) -> None:
        """Writes the tensors of a store into its files; ``locate_values`` names the place of its values afterwards.

        Raises:
            TDServeError: The tensors are incomplete. ``may_still_write`` returns whether the client may still write
                some.
        """

    def locate_values(self, content: control_pb2.Content, order: worker_pb2.PutValues, spool: str) -> None:
        """Adds the place of a write's values to an order, if they do not come with the request.

        Args:
            spool: File of values that arrive over the channel.
        """
        if spool and content.values_nbytes:
            order.spool, order.spool_nbytes = spool, content.values_nbytes

    @abstractmethod
    async def overwrite(self, request: int, store: OpenedStore, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Replaces existing rows, whole or not at all, and commits the change."""

    @abstractmethod
    async def get_selection(
        self, request: int, store: OpenedStore, asked: control_pb2.ReadRequest, accepted: control_pb2.Accepted
    ) -> control_pb2.Done | None:
        """Sends a selection of a store to the client; the result is that of ``get_rows``."""

    @abstractmethod
    async def get_entries(
        self, request: int, store: OpenedStore, asked: control_pb2.GetRequest
    ) -> control_pb2.Done | None:
        """Sends entries of a keyed store to the client; the result is that of ``get_rows``.

        Raises:
            KeyNotFoundError: One is absent.
        """

    @abstractmethod
    async def put_version(
        self, request: int, store: OpenedStore, publishing: UnfinishedVersion, spec: Spec, content: control_pb2.Content
    ) -> None:
        """Writes the file of a version that is not visible to clients yet.

        Raises:
            TDServeError: The file is incomplete.
        """

    @abstractmethod
    async def get_version(self, request: int, version: VersionToSend) -> control_pb2.Done | None:
        """Sends a version to the client; the result is that of ``get_rows``."""

    def may_still_write(self, request: int) -> bool:
        """Returns whether the client may still write files for a request that has failed."""
        return False

    def move_to_tasks(self) -> None:  # noqa: B027 (most have nothing to do)
        """Moves all coroutines that wait for the client into tasks, which can be waited for."""


@dataclass(frozen=True)
class Movers:
    """Who moves what of a session's content: one for all of it, unless a local client may touch only some of the files.

    Attributes:
        reads: Moves rows, selections and versions that are read.
        writes: Moves what is written.
        entries: Moves entries of keyed stores that are read.
    """

    reads: Mover
    writes: Mover
    entries: Mover

    @property
    def transport(self) -> str:
        """Transport of the content, by its public name."""
        return self.reads.transport

    @property
    def uses_channels(self) -> bool:
        """Whether some content, and mail, moves over channels between the client and its worker."""
        return self.entries.uses_channels

    def may_still_write(self, request: int) -> bool:
        """Returns whether the client may still write files for a request that has failed."""
        return self.writes.may_still_write(request)

    def move_to_tasks(self) -> None:
        """Moves all coroutines that wait for the client into tasks, which can be waited for."""
        self.reads.move_to_tasks()
