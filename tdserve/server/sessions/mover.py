"""What moves the content of a session: its data worker, or a client on this machine by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tdserve.base.deadline import Deadline
from tdserve.rules.replay.claims import Claims
from tdserve.rules.replay.plans import RowsPlan
from tdserve.rules.replay.reservation import Reservation
from tdserve.rules.weights import UnfinishedVersion, VersionRecord
from tdserve.server.opened_store import OpenedStore
from tdserve.server.worker_spec_cache import WorkerSpecCache
from tdserve.store.catalog_db import Transaction
from tdserve.structure.tree import Path, Spec
from tdserve.v1 import control_pb2, worker_pb2


@dataclass(frozen=True)
class RowsToFill:
    """Reserved rows of a table.

    Attributes:
        entry: The table.
        reservation: The rows.
        asked: The request whose content they take.
    """

    entry: OpenedStore
    reservation: Reservation
    asked: control_pb2.ExtendRequest

    @cached_property
    def columns(self) -> list[Path]:
        """Leaves whose bytes the table's rules look at."""
        return [path for path in self.entry.rule_keys if path in self.entry.spec.tensors_by_path]

    def name_columns(self, contents: Sequence[bytes]) -> dict[Path, bytes]:
        """The contents of ``columns``, by path."""
        return dict(zip(self.columns, contents, strict=True))


@dataclass(frozen=True)
class VersionToSend:
    """A version of weights that a client gets.

    Attributes:
        entry: The store.
        record: Of the version.
        asked: The request.
        deadline: Of the request.
    """

    entry: OpenedStore
    record: VersionRecord
    asked: control_pb2.LatestRequest
    deadline: Deadline


@dataclass(frozen=True)
class StoreToFill:
    """A store that nobody sees yet.

    Attributes:
        name: For errors.
        uid: Its incarnation.
        ref: How orders to a worker name it.
        spool: Where values that come over the channel wait.
        path: Where it lies below the root, if not where its name says.
    """

    name: str
    uid: str
    ref: Callable[[WorkerSpecCache], worker_pb2.StoreRef]
    spool: str
    path: str = ""


class Mover(ABC):
    """The server's end of a session's content. A session has one at any time, and nobody else asks what kind it is.

    Attributes:
        transport: How content moves, as users know it.
        num_channels: That it needs between the client and its worker.
        lock_name: File that the client holds for as long as it may write the stores' files; "" when it never does.
        claims: Rows that the client takes by itself, by the store's incarnation.
    """

    transport: str
    num_channels = 0
    lock_name = ""

    def __init__(self) -> None:
        self.claims: dict[str, Claims] = {}

    @abstractmethod
    async def put_rows(self, request: int, rows: RowsToFill) -> dict[Path, bytes]:
        """Fills reserved rows; returns what its rules look at. ``forget_rows`` or ``give_up_rows`` follows.

        Raises:
            TDServeError: They were not filled.
        """

    def forget_rows(self, rows: RowsToFill, txn: Transaction) -> None:  # noqa: B027 (most have nothing to do)
        """Rows that were filled are committed by this transaction: nobody need know any more who has filled them."""

    def give_up_rows(self, request: int, rows: RowsToFill) -> None:
        """Frees rows that were not filled, or are not wanted; nobody can write them any more."""
        rows.entry.replay_table().abort(rows.reservation)
        rows.entry.changed.wake()

    @abstractmethod
    async def get_rows(
        self, request: int, entry: OpenedStore, plan: RowsPlan, accepted: control_pb2.Accepted | None
    ) -> control_pb2.Done | None:
        """Brings rows of a table to the client.

        Args:
            accepted: The answer, but for what is known when they are sent; None for a client that waits for the content
                itself.

        Returns:
            The answer; None when the client has it already, and the content follows over the channel.
        """

    @abstractmethod
    async def fill(self, request: int, store: StoreToFill, content: control_pb2.Content) -> None:
        """Puts the tensors of a store into its files; ``locate_values`` says where its values are then.

        Raises:
            TDServeError: They are not all there. ``may_still_write`` says whether somebody goes on.
        """

    def locate_values(self, content: control_pb2.Content, order: worker_pb2.PutValues, spool: str) -> None:
        """Adds to an order where the values of some content lie, if they do not come with the request.

        Args:
            spool: The file for those that come over the channel.
        """
        if spool and content.values_nbytes:
            order.spool, order.spool_nbytes = spool, content.values_nbytes

    @abstractmethod
    async def overwrite(self, request: int, entry: OpenedStore, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        """Replaces rows that are there, whole or not at all, and commits that."""

    @abstractmethod
    async def get_selection(
        self, request: int, entry: OpenedStore, asked: control_pb2.ReadRequest, accepted: control_pb2.Accepted
    ) -> control_pb2.Done | None:
        """Brings a selection of a store to the client; arguments and answer as of ``get_rows``."""

    @abstractmethod
    async def put_version(
        self, request: int, entry: OpenedStore, publishing: UnfinishedVersion, spec: Spec, content: control_pb2.Content
    ) -> None:
        """Makes the file of a version that nobody sees yet.

        Raises:
            TDServeError: It was not made whole. ``may_still_write`` says whether somebody goes on.
        """

    @abstractmethod
    async def get_version(self, request: int, version: VersionToSend) -> control_pb2.Done | None:
        """Brings a version to the client; answers as ``get_rows`` does."""

    def may_still_write(self, request: int) -> bool:
        """Whether the client may go on writing files for a request that has failed."""
        return False

    def move_to_tasks(self) -> None:  # noqa: B027 (most have nothing to do)
        """Has all that waits for the client go on in tasks, which can be waited for."""
