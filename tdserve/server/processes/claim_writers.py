"""The two kinds of writers that claim rows of tables, as far as decisions about their claims differ.

``server/README.md`` has a reading order of claims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tdserve.base.ids import CLIENT_ID_BYTES
from tdserve.rules.channel_transports import AT_ONCE_TRANSPORT, LOCAL_TRANSPORT
from tdserve.server.execution.idempotency import CommittedAnswers
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.v1 import control_pb2

_ANY_CLIENT = bytes(CLIENT_ID_BYTES)


@dataclass(frozen=True)
class ClaimWriter(ABC):
    """A writer that claims rows, also of an earlier run of the server.

    Attributes:
        lock_name: Names it among all writers of all runs. A local client holds the lock of this name for as long as it
            may write; a worker needs none, since each run of the server begins without the workers of the last one.
        client_id: Id of the local client; zeros for a worker, which writes for many clients.
        transport: The transport that its extends count for.
    """

    lock_name: str
    client_id: bytes
    transport: ClassVar[str]

    @property
    @abstractmethod
    def writer_id(self) -> bytes:
        """Id of the writer, also across its sessions."""

    @abstractmethod
    def may_write_for(self, client_id: bytes) -> bool:
        """Returns whether it may record an extend of this client."""

    @abstractmethod
    def is_overtaken(self, extend: ClaimedRows, answers: CommittedAnswers) -> bool:
        """Returns whether a retry of a recorded extend was faster, so that its rows must not be stored again."""

    @abstractmethod
    def select_retried(self, extends: Sequence[ClaimedRows]) -> Sequence[ClaimedRows]:
        """Returns those of its next extends that may be retried; the last one always is among them."""

    @abstractmethod
    def find_outdated(self, last_request: int | None) -> int | None:
        """Returns the request before the next extends if its answer is not needed any more after them."""

    @abstractmethod
    def describe_content(self, nbytes: int) -> control_pb2.Content:
        """Returns the content that was received with extends of this many bytes."""


class LocalWriter(ClaimWriter):
    """A local client. It fills rows by itself, and retries an extend only before it begins the next one."""

    transport = LOCAL_TRANSPORT

    @property
    def writer_id(self) -> bytes:
        """The client's id."""
        return self.client_id

    def may_write_for(self, client_id: bytes) -> bool:
        """Returns whether it is this client."""
        return client_id == self.client_id

    def is_overtaken(self, extend: ClaimedRows, answers: CommittedAnswers) -> bool:
        """Returns False: its records are read before its requests are handled."""
        return False

    def select_retried(self, extends: Sequence[ClaimedRows]) -> Sequence[ClaimedRows]:
        """Returns the last one."""
        return extends[-1:]

    def find_outdated(self, last_request: int | None) -> int | None:
        """Returns that request."""
        return last_request

    def describe_content(self, nbytes: int) -> control_pb2.Content:
        """Returns none: nothing was sent."""
        return control_pb2.Content()


class WorkerWriter(ClaimWriter):
    """A data worker. It fills rows for the clients of its sessions, each of which may retry what it has sent."""

    transport = AT_ONCE_TRANSPORT

    def __init__(self, lock_name: str) -> None:
        super().__init__(lock_name, _ANY_CLIENT)

    @property
    def writer_id(self) -> bytes:
        """Its name."""
        return self.lock_name.encode()

    def may_write_for(self, client_id: bytes) -> bool:
        """Returns True."""
        return True

    def is_overtaken(self, extend: ClaimedRows, answers: CommittedAnswers) -> bool:
        """Returns whether the client has its answer: its session was lost, and the worker did not know yet."""
        return not answers.is_expected(extend.client_id, extend.request)

    def select_retried(self, extends: Sequence[ClaimedRows]) -> Sequence[ClaimedRows]:
        """Returns all."""
        return extends

    def find_outdated(self, last_request: int | None) -> int | None:
        """Returns None: that request may be another client's."""
        return None

    def describe_content(self, nbytes: int) -> control_pb2.Content:
        """Returns one message of all rows, as for coalesced extends."""
        return control_pb2.Content(message_nbytes=[nbytes])


def make_claim_writer(lock_name: str, client_id: bytes) -> ClaimWriter:
    """Returns the writer that a record names so."""
    return WorkerWriter(lock_name) if client_id == _ANY_CLIENT else LocalWriter(lock_name, client_id)
