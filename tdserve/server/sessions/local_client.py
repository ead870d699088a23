"""A session's client on this machine, which reads and writes the stores' files itself."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tdserve.base.errors import PeerLostError
from tdserve.base.ids import make_uid
from tdserve.base.machine import read_pid_namespace
from tdserve.control.local import LocalConnection
from tdserve.control.status import decode_failure
from tdserve.server.execution.inline_tasks import InlineFuture
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.exchange.spools import make_spool_path
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2, worker_pb2

_KEY_BYTES = 16


@dataclass(frozen=True)
class Invitation:
    """An offer to a client to prove that it runs on this machine.

    Attributes:
        lock_name: File that the client locks if it intends to write.
        key: Secret that the client shows on the local socket.
    """

    lock_name: str
    key: bytes

    @classmethod
    def make(cls) -> Invitation:
        """Makes an invitation with a new lock name and key."""
        return cls(make_uid(), secrets.token_bytes(_KEY_BYTES))

    def make_message(self, root: Root, *, is_lending: bool) -> control_pb2.LocalRoot:
        """Returns the message from which the client learns whether it sees the same files.

        Args:
            root: The root.
            is_lending: Whether a client that does not see it may borrow descriptors.

        Raises:
            CorruptDataError: The root's files have been removed.
        """
        with convert_os_errors(root.nonce_path):
            nonce = os.stat(root.nonce_path)
        return control_pb2.LocalRoot(
            root=str(root.path),
            nonce=root.nonce,
            device=nonce.st_dev,
            inode=nonce.st_ino,
            pid_namespace=read_pid_namespace(),
            lock_name=self.lock_name,
            key=self.key,
            is_lending=is_lending,
        )


_Waiting = asyncio.Future[control_pb2.Written] | InlineFuture[control_pb2.Written]


class LocalClient:
    """The connection to a local client: sends messages, and waits until the client has written.

    Args:
        session: Number of its session, for errors.
        connection: Its connection.
        attach: The client's first message.
        lock_name: Lock file that the client holds; "" when it only reads.
        is_gone: Returns whether the holder of a lock file can write no more.
        sessions_folder: Folder of the lock files.
    """

    def __init__(
        self,
        session: int,
        connection: LocalConnection,
        attach: control_pb2.Attach,
        *,
        lock_name: str,
        is_gone: Callable[[str], bool],
        sessions_folder: Path,
    ) -> None:
        self._sessions_folder = sessions_folder
        self._session = session
        self._connection = connection
        self._is_gone = is_gone
        # None: no request waits any more, but the client may be writing still. A future that has failed keeps its
        # error, which keeps all calls that it has passed, and their stores.
        self._writing: dict[int, _Waiting | None] = {}
        self._is_lost = False
        self.lacks_values = attach.lacks_values
        self.lock_name = lock_name

    async def send(self, message: control_pb2.ServerMessage, rest: bytes = b"") -> None:
        """Sends a message, without waiting for anything. ``rest`` and errors are those of ``LocalConnection.send``."""
        self._connection.send(message, rest)

    def let_write(
        self, request: int, accepted: control_pb2.Accepted, rest: bytes = b""
    ) -> asyncio.Future[control_pb2.Written]:
        """Lets the client write (or, for a read, copy) what ``accepted`` describes; the future ends when it has done
        so.

        Raises (from the future):
            PeerLostError: The session has ended; the client may still be writing, until it is proved gone.
            TDServeError: The client's reason not to write; it has written nothing and will not.
        """
        future: asyncio.Future[control_pb2.Written] = asyncio.get_running_loop().create_future()
        self._let(request, accepted, future, rest)
        return future

    def let_fill(self, request: int, accepted: control_pb2.Accepted) -> InlineFuture[control_pb2.Written]:
        """Like ``let_write``, for callers that wait for nothing else; outside a task no task is created."""
        turn: InlineFuture[control_pb2.Written] = InlineFuture()
        self._let(request, accepted, turn)
        return turn

    def _let(
        self,
        request: int,
        accepted: control_pb2.Accepted,
        waiting: _Waiting,
        rest: bytes = b"",
    ) -> None:
        if self._is_lost:
            waiting.set_exception(self._make_lost_error())
        else:
            self._connection.send(control_pb2.ServerMessage(request=request, accepted=accepted), rest)
            self._writing[request] = waiting

    def move_to_tasks(self) -> None:
        """Moves all coroutines that wait for the client into tasks, which can be waited for."""
        for waiting in list(self._writing.values()):
            if isinstance(waiting, InlineFuture):
                waiting.move_to_task()

    def on_written(self, request: int, written: control_pb2.Written) -> None:
        """Ends the wait for a write: the client has done it, or reports why it will not."""
        future = self._writing.pop(request, None)
        if future is None or future.done():
            return
        if written.HasField("failure"):
            future.set_exception(decode_failure(written.failure))
        else:
            future.set_result(written)

    def add_spool(self, content: control_pb2.Content, order: worker_pb2.PutValues) -> None:
        """Adds to an order the place where this client has put the values of a write."""
        if content.spool_nbytes and self.lock_name:
            order.spool = str(make_spool_path(self._sessions_folder, self.lock_name))
            order.spool_offset, order.spool_nbytes = content.spool_offset, content.spool_nbytes

    def is_writing(self, request: int) -> bool:
        """Returns whether the client was permitted to write and has not reported the end of it."""
        return request in self._writing

    def may_still_write(self, request: int) -> bool:
        """Returns whether the client is writing and not proved gone."""
        return self.is_writing(request) and bool(self.lock_name) and not self._is_gone(self.lock_name)

    def lose(self) -> None:
        """Ends the connection with its session; all waits for the client fail that it has not ended itself.
        Idempotent."""
        self._is_lost = True
        self._connection.read_rest()
        waiting, self._writing = self._writing, dict.fromkeys(self._writing)
        for future in waiting.values():
            if future is not None and not future.done():
                future.set_exception(self._make_lost_error())
        self._connection.close()

    def _make_lost_error(self) -> PeerLostError:
        return PeerLostError(peer=f"the client of session {self._session}", reason="its session has ended")
