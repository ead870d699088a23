"""What moves the content of a session at the client's end: channels, or this process by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import RemoteProtocolError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.local.claims import RowClaim
from tdserve.client.session.outgoing import Outgoing, WriteTarget
from tdserve.client.session.pending import Reply
from tdserve.data.opened import MappedStore
from tdserve.messages.selection.selection import Selection
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2


@dataclass(frozen=True)
class WantedRows:
    """How rows of a table are wanted.

    Attributes:
        name: Of the table.
        stored: Its structure.
        added: Columns that come with them.
        keeps_fault: Whether values that cannot be decoded are no error here; the content says so.
        device: Where the content will be moved, as of ``receive``.
    """

    name: str
    stored: Spec
    added: tuple[str, ...] = ()
    keeps_fault: bool = False
    device: Any = None


@dataclass(frozen=True)
class WantedSelection:
    """Which part of a tensordict store is wanted; attributes as the arguments of ``read_selection``."""

    name: str
    selection: Selection
    keys: tuple[Path, ...]
    spec: Spec | None
    newer_than: int | None
    destination: Destination | None
    device: Any
    allow_pickle: bool | None

    def request(self, deadline: Deadline) -> control_pb2.ReadRequest:
        """The request for it."""
        return control_pb2.ReadRequest(
            store=self.name,
            selection=self.selection.to_message(),
            keys=[content_pb2.Path(parts=path) for path in self.keys],
            fingerprint=self.spec.fingerprint if self.spec is not None else b"",
            newer_than=None if self.newer_than is None or self.newer_than < 0 else self.newer_than,
            timeout_s=deadline.remaining_s,
        )


class ClientMover(ABC):
    """The client's end of a session's content, chosen when the session opens. Nobody else asks what kind it is.

    Attributes:
        transport: How content moves, as users know it.
        max_joined_bytes: Up to so many bytes of tensors travel together in one request.
        takes_claims: Whether rows can be claimed.
    """

    transport: str
    max_joined_bytes = 4 * 1024 * 1024  # as much as one data message holds
    takes_claims = False

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether content can be sent without waiting for anything."""

    @property
    @abstractmethod
    def inline_bytes(self) -> int:
        """Content up to this size needs no channel."""

    @abstractmethod
    def prepare(
        self,
        captured: Sequence[Captured],
        target: WriteTarget,
        *,
        margin_nbytes: int = 0,
        fetch: Callable[[], Captured] | None = None,
    ) -> Outgoing:
        """The content of a write, as a request over this session takes it along or announces it; arguments and errors
        as of ``Outgoing``.

        Args:
            margin_nbytes: What else the request carries.
            fetch: Gives the content when the request is on its way; ``captured`` is only what the request announces: a
                structure without values, of more than ``inline_bytes``.
        """

    def take_apart(self, captured: Captured) -> None:  # noqa: B027 (most of it is taken apart where it is sent)
        """Does what can be done of ``prepare`` and what follows before the request is sent."""

    def open_claim(self, name: str, stored: Spec, claim: control_pb2.Claim) -> RowClaim:
        """Opens what the server lets this client claim. Errors as of ``RowClaim``."""
        raise RemoteProtocolError(expected="rows on request", received="a claim")

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """The mapped store of this name and structure, if this session has read it before and it is still the same."""
        return None

    def open_mapped(self, name: str, spec: Spec, accepted: control_pb2.Accepted) -> MappedStore:
        """The store that the server has let this client read, mapped."""
        raise RemoteProtocolError(expected="content", received="a permit to read it")

    @abstractmethod
    def take_rows(self, reply: Reply, wanted: WantedRows) -> Content:
        """Takes the rows of a table that the server has chosen."""

    @abstractmethod
    def read_known(self, wanted: WantedSelection, stored: Spec, request: int, deadline: Deadline) -> Content | None:
        """Reads a store whose structure is known with fewer messages than others; None where that cannot be: it is to
        be asked for as ever."""

    @abstractmethod
    def take_selection(self, reply: Reply, wanted: WantedSelection, stored: Spec) -> Content:
        """Takes what is wanted of a store of this structure."""

    def find_file(self, path: str) -> FilePath:
        """Where this process sees a file of the server's root."""
        raise RemoteProtocolError(expected="content", received="the name of a file")

    @abstractmethod
    def check_maps(self, what: str, *, writable: bool) -> None:
        """Raises NotSupportedError unless this process can map stores, and write them if that is asked."""

    def forget_deleted(self) -> None:  # noqa: B027 (most hold nothing)
        """Lets go of stores and versions that were deleted: while they are mapped, their space is not free."""
