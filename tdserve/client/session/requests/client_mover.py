"""The client's end of a session that moves content: over channels, or by this process itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import RemoteProtocolError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.local.local_claim import LocalClaim
from tdserve.client.session.requests.known_stores import KnownStore
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import OnAnnounced, Reply
from tdserve.data.mapped_stores import MappedStore
from tdserve.messages.content import select_keys
from tdserve.messages.selection.selection import Selection
from tdserve.store.values.entry_tables import FoundEntries
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2


@dataclass(frozen=True)
class WantedRows:
    """How rows of a table are read.

    Attributes:
        name: Name of the table.
        stored: Its structure.
        keys: The leaves or nodes of each row to read; () for all.
        added: Columns that come with them.
        keeps_fault: Whether the content carries the error of values that cannot be decoded, instead of raising it here.
        device: Where the content will be moved, as in ``receive_content``.
        kind: Kind of the table that is meant; unspecified: any.
    """

    name: str
    stored: Spec
    keys: tuple[Path, ...] = ()
    added: tuple[str, ...] = ()
    keeps_fault: bool = False
    device: Any = None
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_UNSPECIFIED

    @property
    def chosen(self) -> Spec:
        """The part of the structure that is read.

        Raises:
            KeyNotFoundError: A key does not exist.
        """
        return select_keys(self.stored, self.keys, store=self.name)


@dataclass(frozen=True)
class WantedSelection:
    """The part of a tensordict store that is read; attributes as the arguments of ``read_selection``, and what the
    client knows of a store whose structure was not given."""

    name: str
    selection: Selection
    keys: tuple[Path, ...]
    spec: Spec | None
    newer_than: int | None
    destination: Destination | None
    device: Any
    allow_pickle: bool | None
    known: KnownStore | None = None

    def make_message(self, deadline: Deadline) -> control_pb2.ReadRequest:
        """Makes the request for it."""
        return control_pb2.ReadRequest(
            store=self.name,
            selection=self.selection.to_message(),
            keys=[content_pb2.Path(parts=path) for path in self.keys],
            fingerprint=self.spec.fingerprint if self.spec is not None else b"",
            identity=self.known.identity if self.known is not None else "",
            newer_than=None if self.newer_than is None or self.newer_than < 0 else self.newer_than,
            timeout_s=deadline.remaining_s,
            kind=control_pb2.STORE_KIND_TENSORDICT,
        )


class ClientMover(ABC):
    """The client's end of what moves some of a session's content. No other code asks which kind it is.

    Attributes:
        transport: How content moves, as users know it.
        max_joined_bytes: Tensors of several writes share a request up to this size.
        takes_claims: Whether rows can be claimed.
        draws_rows: Whether it can draw rows of tables without a request.
        receives_messages: Whether content that is read comes over the channel, beyond ``inline_bytes``.
    """

    transport: str
    max_joined_bytes = 4 * 1024 * 1024  # the size of one data message
    takes_claims = False
    draws_rows = False
    receives_messages = True

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether content can be sent without waiting."""

    @property
    @abstractmethod
    def inline_bytes(self) -> int:
        """Largest content that needs no channel."""

    @abstractmethod
    def prepare(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """Prepares the content of a write, which its request carries or announces.

        Arguments and errors as in ``Outgoing``.

        Args:
            margin_nbytes: Size of what else the request carries.
            fetch: Returns the content once the request was sent; ``captured`` is then only what the request announces:
                a structure without values, of more than ``inline_bytes``.
        """

    def take_apart(self, captured: Captured) -> None:  # noqa: B027 (most of it is taken apart where it is sent)
        """Performs, before the request is sent, as much of ``prepare`` and the send as possible."""

    def open_claim(self, name: str, stored: Spec, claim: control_pb2.Claim) -> LocalClaim:
        """Opens rows that the server lets this client claim. Errors as in ``LocalClaim``."""
        raise RemoteProtocolError(expected="rows on request", received="a claim")

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """Returns the mapped store of this name and structure; None if it was not read before, or has changed."""
        return None

    def open_mapped(self, name: str, spec: Spec, accepted: control_pb2.Accepted) -> MappedStore:
        """Maps the store that the server has allowed this client to read."""
        raise RemoteProtocolError(expected="content", received="a permit to read it")

    def make_early_receiver(self, request: int, make_wanted: Callable[[], WantedRows]) -> OnAnnounced | None:
        """Returns what starts to receive the rows of a request as soon as they are announced; None if rows need no
        receiving.

        Args:
            make_wanted: Returns how the rows are read.
        """
        return None

    @abstractmethod
    def take_rows(self, reply: Reply, wanted: WantedRows) -> Content:
        """Receives the rows of a table that the server has chosen."""

    def read_listed(self, wanted: WantedRows, selection: Selection) -> Content | None:
        """Reads rows by number without a request; None if that is not possible, and the server must be asked."""
        return None

    def draw_rows(self, wanted: WantedRows, num_rows: int, *, is_counted: bool) -> Content | None:
        """Draws rows, each live row with the same probability, without a request; None as in ``read_listed``.

        Args:
            is_counted: Whether they count as sampled. False for those that replace rows which do.
        """
        return None

    @abstractmethod
    def read_known(self, wanted: WantedSelection, stored: Spec, request: int, deadline: Deadline) -> Content | None:
        """Reads a store of known structure with fewer messages.

        None if that is not possible, and a normal read is needed.
        """

    @abstractmethod
    def take_selection(self, reply: Reply, wanted: WantedSelection, stored: Spec) -> Content:
        """Receives the selected part of a store of this structure."""

    def find_entries(self, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries | None:
        """Returns entries of a keyed store, absent ones too, without a request; None if that is not possible."""
        return None

    @abstractmethod
    def take_entries(self, reply: Reply, name: str, stored: Spec, keys: Sequence[bytes]) -> FoundEntries:
        """Receives the entries of a keyed store that the server has announced or permitted to read."""

    def locate(self, path: str, uid: str) -> AbstractContextManager[FilePath]:
        """Yields where this process finds a file of the server's root, until the end of the block."""
        raise RemoteProtocolError(expected="content", received="the name of a file")

    @abstractmethod
    def check_maps(self, what: str, *, writable: bool) -> None:
        """Raises NotSupportedError unless this process can map stores, and write to them if asked."""

    def forget_deleted(self) -> None:  # noqa: B027 (most hold nothing)
        """Unmaps stores and versions that were deleted, which frees their space."""


@dataclass(frozen=True)
class ClientMovers:
    """Who moves what of a session's content: one for all of it, unless this process may touch only some of the server's
    files.

    Attributes:
        reads: Moves rows, stores and versions that are read.
        writes: Moves what is written.
        entries: Moves entries of keyed stores that are read.
    """

    reads: ClientMover
    writes: ClientMover
    entries: ClientMover

    @property
    def transport(self) -> str:
        """How content moves, as users know it."""
        return self.reads.transport
