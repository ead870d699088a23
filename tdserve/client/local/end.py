"""A session's local end on the server's machine: the socket, the lock that proves it alive, the mapped stores."""

from __future__ import annotations

import atexit
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from threading import Lock
from typing import Protocol
from weakref import WeakSet

from tdserve.base.errors import (
    ConnectError,
    CorruptDataError,
    NotLocalError,
    NotSupportedError,
    PeerLostError,
    StoreNotFoundError,
    TransferAbortedError,
)
from tdserve.base.machine import explain_not_shared, read_pid_namespace
from tdserve.base.timed_queue import TimedQueue
from tdserve.client.local.overwrites import Overwrites
from tdserve.client.local.root_files import FileAccess, RootFiles, StoreFolder, find_files, make_deleted_error
from tdserve.control.local import ATTACH_TIMEOUT_S, SocketEnd
from tdserve.control.status import encode_failure
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.data.own_reads import OwnReads
from tdserve.rules.channel_transports import LOCAL_TRANSPORT
from tdserve.rules.replay.allocation.shared_numbers import NO_READER
from tdserve.store.exchange.session_locks import SessionLock
from tdserve.store.exchange.spools import Spool
from tdserve.store.roots.root import STORES
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, is_marked_deleted, is_of
from tdserve.store.weights.version_mappings import drop_unlinked
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.values.value_columns import Buffer

MIN_SPOOLED_BYTES = 32 * 1024
"""Fewer values are sent faster in the request than through a file."""

MAX_KEPT_STORES = 512
"""Most stores that stay mapped; with each new one all of them are asked whether they were deleted."""

MAX_LENT_STORES = 128
"""The same for lent ones: each takes a descriptor, of which a process often has no more than 1,024."""

OVERWRITES_TIMEOUT_S = 5.0
"""Time for overwrites under way when their session is closed: a copy, and two messages with a running server."""


class Filling(Protocol):
    """Something that writes into rows in threads of the user."""

    def close(self) -> None:
        """Waits until nothing is being written, and lets no write begin any more."""


class LocalEnd:
    """The local end of a session. Build it with :meth:`open`. Threads: safe.

    Args:
        files: The files below the server's root.
        lock: The session's lock; None if this process may not write the files.
        spool: File for values that it writes.
        lacks_values: As below.
        access: Learns what the server does not lend.

    Attributes:
        files: As given.
        root: The server's root folder, as this process sees it.
        is_read_only: Whether this process may not write the files.
        lacks_values: Whether it cannot read non-tensor values itself.
        own_reads: Finds rows of tables without a request.
    """

    def __init__(
        self,
        files: RootFiles,
        *,
        lock: SessionLock | None,
        spool: Spool | None,
        lacks_values: bool,
        access: FileAccess | None = None,
    ) -> None:
        self.root = files.root
        self._access = access or FileAccess()
        self.files = files
        self.is_read_only = lock is None
        self.lacks_values = lacks_values
        self.own_reads = OwnReads(NO_READER)
        self._lock = lock
        self._spool = spool
        self._socket: SocketEnd | None = None
        self._stores = OpenStores(
            writes_values=False,
            lacks_values=lacks_values,
            is_read_only=self.is_read_only,
            max_stores=MAX_LENT_STORES if files.is_lent else MAX_KEPT_STORES,
        )
        self._claims: WeakSet[Filling] = WeakSet()
        self._claims_lock = Lock()
        self._is_over = False
        self._overwrites = Overwrites(str(files.root))
        self._welcomed: TimedQueue[bool] = TimedQueue()
        _ends.add(self)

    @classmethod
    def open(
        cls,
        welcome: control_pb2.Welcome,
        *,
        access: FileAccess,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_lost: Callable[[], None],
    ) -> LocalEnd:
        """Proves to the server that this process sees its files, or borrows them.

        Args:
            welcome: The server's message, which describes its root.
            access: How this client reaches the files.
            on_message: Called for every message, in a thread of its own, which also writes content in place.
            on_lost: Called at the end of that thread.

        Raises:
            ConnectError: It does not see them, or may not use them, and the server does not lend them. The error gives
                the reason.
            PeerLostError: The server does not admit it: probably it does not know the session any more.
        """
        offered = welcome.local
        files = find_files(welcome, access)
        sessions_folder = files.root / "sessions"
        lock = None if files.is_lent else SessionLock.hold(sessions_folder, offered.lock_name)
        try:
            spool = None if lock is None else Spool(sessions_folder, offered.lock_name)
            # Reading values means writing into a lock file, by process id.
            lacks_values = lock is None or not offered.pid_namespace or offered.pid_namespace != read_pid_namespace()
            end = cls(files, lock=lock, spool=spool, lacks_values=lacks_values, access=access)
            end._attach(welcome, on_message, on_lost)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return end

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message.

        Raises ConnectError if the server is gone, or the session is being closed and the message would begin an
        overwrite."""
        if self._socket is None:
            raise ConnectError(address=str(self.root), reason="the local socket was closed")
        self._overwrites.begin(message)
        self._socket.send(message)

    def flush(self, timeout_s: float) -> None:
        """Waits until the server has received what was sent, at most for this time; nothing can be sent any more."""
        if self._socket is not None:
            self._socket.flush(timeout_s)

    def look(self) -> None:
        """Handles urgent messages in the thread that receives them, while it writes content in place."""
        if self._socket is not None:
            self._socket.look()

    def store(self, name: str, uid: str, spec: Spec, *, structure: int = 0, path: str = "") -> MappedStore:
        """Maps the store of this incarnation.

        Args:
            spec: Its whole structure.
            structure: The server's number of that structure.
            path: Its folder below the root, if it differs from the one of its name.

        Raises:
            TransferAbortedError: It was deleted or changed since.
            CorruptDataError: Its files are missing or damaged.
            PeerLostError: The server does not lend them: the next session moves content over the network.
        """
        found = self._stores.find(uid)
        if found is not None and found.structure == structure:
            return found
        self._stores.forget_deleted()
        opened = StoreFolder(self.root / path) if path else self._open_folder(name)
        folder = opened.path
        ref = worker_pb2.StoreRef(uid=uid, folder=str(folder), fingerprint=spec.fingerprint, structure=structure)
        try:
            return self._stores.get(ref, spec, name=name, keeps=opened)
        except (CorruptDataError, StoreNotFoundError) as error:
            generations = folder / GENERATION_FILE
            is_here = is_of(generations, uid=uid) and not is_marked_deleted(generations)
            if isinstance(error, CorruptDataError) and is_here:
                raise
            raise make_deleted_error(name) from error

    @contextmanager
    def locate(self, path: str, uid: str) -> Iterator[FilePath]:
        """Yields where this process finds a file of a store, until the end of the block.

        Args:
            path: Its path below the root.
            uid: The store's incarnation.

        Raises:
            TransferAbortedError: The store was deleted, or has got another folder.
            PeerLostError: As in ``store``.
        """
        _, store, *names = path.split("/")
        folder = self._open_folder(store, uid)
        try:
            yield folder.path.joinpath(*names)  # good as long as this frame has the folder
        except TransferAbortedError:  # its file is gone: the store may have got another folder
            self.files.forget(store)
            raise
        except CorruptDataError as error:
            if not folder.is_kept:
                shown = str(error.fields["path"]).replace(str(folder.path), str(self.root / STORES / store))
                raise error.with_fields(path=shown) from error
            self.files.forget(store)
            raise TransferAbortedError(transfer=0, reason=f"store {store!r} has got another folder") from error

    def _open_folder(self, name: str, uid: str = "") -> StoreFolder:
        try:
            return self.files.open_folder(name, uid=uid)
        except CorruptDataError as error:
            raise make_deleted_error(name) from error
        except NotSupportedError as error:
            self._access.why_not_lent = str(error)
            raise PeerLostError(peer="the server's lender of folders", reason=str(error)) from error

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """Returns the tensordict or keyed store of this name and structure.

        None if this client has not read it before, or it has changed.
        """
        store = self._find_readable(name, spec)
        return None if store is None or store.is_table else store

    def find_table(self, name: str, spec: Spec, kind: int) -> MappedStore | None:
        """Returns the table of this name, structure and kind; None as in ``find_known``."""
        store = self._find_readable(name, spec)
        return store if store is not None and store.is_table and store.is_of_kind(kind) else None

    def _find_readable(self, name: str, spec: Spec) -> MappedStore | None:
        store = self._stores.find_readable(name)
        if store is None:
            self._stores.forget_deleted()
        return store if store is not None and store.spec.fingerprint == spec.fingerprint else None

    def forget_deleted(self) -> None:
        """Unmaps stores and versions that were deleted, which frees their space."""
        self._stores.forget_deleted()
        drop_unlinked()

    def remember_readable(self, store: MappedStore) -> None:
        """Remembers that the server lets this client read a store: until it is deleted, its name means this one. Does
        nothing if the store has values and this client cannot read them."""
        if not (self.lacks_values and store.spec.values):
            self._stores.remember_readable(store)

    def spool(self, values: Sequence[Buffer]) -> tuple[int, int] | None:
        """Puts values, given in parts, where the worker reads them; None if they are few, and go into the request.

        Raises:
            CapacityError, InvalidRequestError: There is no room for them.
        """
        nbytes = sum(map(len, values))
        return None if self._spool is None or nbytes < MIN_SPOOLED_BYTES else self._spool.put(values, nbytes)

    def free(self, spooled: tuple[int, int]) -> None:
        """Frees the space of values that were read, or will not be."""
        if self._spool is not None:
            self._spool.free(*spooled)

    def keep(self, claim: Filling) -> None:
        """Adds something that fills rows by itself; the session closes it before it ends.

        Raises:
            ConnectError: The session is over.
        """
        with self._claims_lock:
            if self._is_over:
                raise ConnectError(address=str(self.root), reason="the session is over")
            self._claims.add(claim)

    def check_writable(self, what: str) -> None:
        """Raises NotSupportedError if this process may only read."""
        if self.is_read_only:
            reason = f"this process may not write the files in {self.root}; connect with transport='gloo' to write"
            raise NotSupportedError(feature=what, reason=reason)

    def end_overwrites(self) -> None:
        """Cancels waiting overwrites, and waits some seconds for those under way; none can begin any more.

        Rows that are being overwritten when the connection ends are lost, even if they were written completely. In the
        thread that receives messages it waits for nothing, since that would be for itself.
        """
        if self._socket is not None:
            self._end_overwrites(0.0 if self._socket.is_reading_here else OVERWRITES_TIMEOUT_S)

    def _end_overwrites(self, timeout_s: float) -> None:
        self._overwrites.end(self._give_up, self._refuse, timeout_s)

    def _refuse(self, request: int) -> None:
        error = TransferAbortedError(transfer=request, reason="its client closes the session before it was permitted")
        written = control_pb2.Written(failure=encode_failure(error))
        with suppress(ConnectError):  # the session is over: nothing was permitted
            self.send(control_pb2.ClientMessage(request=request, written=written))

    def _give_up(self, request: int) -> None:
        with suppress(ConnectError):  # the session is over: nothing to cancel
            self.send(control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=request)))

    @property
    def is_copying(self) -> bool:
        """Whether an overwrite is being copied: meanwhile no message is received."""
        return self._overwrites.is_copying

    def close(self) -> None:
        """Ends the connection; refuses overwrites without a permit, and finishes content that is being written.
        Idempotent."""
        if self._socket is not None:
            self._end_overwrites(0.0)
            self._socket.close()

    def _attach(
        self,
        welcome: control_pb2.Welcome,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_lost: Callable[[], None],
    ) -> None:
        is_in = False

        def receive(message: control_pb2.ServerMessage) -> None:
            nonlocal is_in
            if message.HasField("welcome"):
                is_in = True
                self.own_reads = OwnReads(message.welcome.reader)
                self._welcomed.put(True)
            elif self._overwrites.admit(message):
                on_message(message)
                self._overwrites.on_message(message)

        def on_end() -> None:
            self._overwrites.lose()
            with self._claims_lock:
                self._is_over, claims = True, list(self._claims)
            for claim in claims:
                claim.close()
            # This session writes nothing more: from here on its rows may be given to others.
            if self._spool is not None:
                self._spool.close()
            if self._lock is not None:
                self._lock.release()
            self._welcomed.put(False)
            if is_in:  # else the session continues without it
                on_lost()
            self._stores.close()

        self._socket = SocketEnd(self.files.connect(), on_message=receive, on_end=on_end)
        attach = control_pb2.Attach(
            session=welcome.session,
            key=welcome.local.key,
            is_read_only=self.is_read_only,
            lacks_values=self.lacks_values,
        )
        self._socket.start()
        try:
            self.send(control_pb2.ClientMessage(attach=attach))
            was_let_in = self._welcomed.get(ATTACH_TIMEOUT_S)
        except ConnectError:
            was_let_in = False
        if not was_let_in:
            self._socket.close()
            raise PeerLostError(peer="the server's local socket", reason="it did not let this client in")

    def _forget(self) -> None:
        """Closes the lock and the socket in a forked child, where they must not outlive the parent's."""
        if self._lock is not None:
            self._lock.release()
        if self._socket is not None:
            self._socket.drop()


_ends: weakref.WeakSet[LocalEnd] = weakref.WeakSet()


def _forget_all() -> None:
    for end in list(_ends):
        end._forget()
    _ends.clear()  # at its exit the child would wait for overwrites of its parent


def _close_all() -> None:
    for end in list(_ends):
        end.end_overwrites()
        end.close()


os.register_at_fork(after_in_child=_forget_all)
# A thread that is inside torch when the interpreter exits would abort the whole process.
atexit.register(_close_all)


def open_local(
    welcome: control_pb2.Welcome,
    *,
    transport: str,
    access: FileAccess,
    address: str,
    on_message: Callable[[control_pb2.ServerMessage], None],
    on_lost: Callable[[], None],
    machine: str | None = None,
) -> tuple[LocalEnd | None, str]:
    """Opens the local end if this process sees the server's files; else returns the reason why not.

    Args:
        transport: The requested transport: ``LOCAL_TRANSPORT`` requires a local end.
        address: Address of the server, for errors.
        access, on_message, on_lost: As for ``LocalEnd.open``.
        machine: Kind of processor; None is that of this machine.

    Raises:
        NotLocalError: Shared memory was requested and is not available.
        PeerLostError: It was requested, and the server does not admit this client any more.
    """
    unordered = explain_not_shared(platform.machine() if machine is None else machine)
    if unordered or not welcome.HasField("local"):
        error = ConnectError(address=address, reason=unordered or "the server runs on another machine")
    else:
        try:
            return LocalEnd.open(welcome, access=access, on_message=on_message, on_lost=on_lost), ""
        except PeerLostError as failure:
            if transport == LOCAL_TRANSPORT:
                raise
            return None, str(failure.fields["reason"])
        except ConnectError as failure:
            error = failure
    reason = str(error.fields["reason"])
    if transport == LOCAL_TRANSPORT:
        raise NotLocalError(address=address, reason=reason) from error
    return None, reason
