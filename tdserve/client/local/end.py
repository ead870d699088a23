"""A session's end on the server's own machine: the socket, the lock that proves it alive, the mapped stores."""

from __future__ import annotations

import atexit
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path as FilePath
from queue import Empty, SimpleQueue
from threading import Condition, Lock
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
from tdserve.base.machine import pid_namespace, why_not_shared
from tdserve.control.local import ATTACH_TIMEOUT_S, SocketEnd
from tdserve.data.opened import MappedStore, OpenStores
from tdserve.messages.value_columns import Buffer
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, is_of
from tdserve.store.session_locks import SessionLock
from tdserve.store.spools import Spool
from tdserve.store.version_mappings import drop_unlinked
from tdserve.structure.tree import Spec
from tdserve.v1 import control_pb2, worker_pb2


class Overwrites:
    """The overwrites of one session, from their request to their answer. Threads: safe.

    New rows of a writer that goes away are nobody's. Rows that were there, and that it was about to overwrite, are lost
    to all. So whoever ends a session gives up the overwrites that still wait, and waits for those that the server has
    let it do: which these are, only the answers tell.

    Args:
        place: Where the session is, for errors.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._changed = Condition()
        self._under_way: set[int] = set()
        self._is_ending = False

    def begin(self, message: control_pb2.ClientMessage) -> None:
        """A message is sent now. Raises ConnectError when it would begin an overwrite and none may begin any more."""
        if message.HasField("write"):
            with self._changed:
                if self._is_ending:
                    raise ConnectError(address=self._place, reason="the session is being closed by this client")
                self._under_way.add(message.request)

    def on_message(self, message: control_pb2.ServerMessage) -> None:
        """A message of the server was dealt with."""
        if self._under_way and not message.HasField("accepted"):
            with self._changed:
                self._under_way.discard(message.request)
                self._changed.notify_all()

    def end(self, give_up: Callable[[int], None], timeout_s: float) -> None:
        """None begins any more; waits for the end of those under way, or so long.

        Args:
            give_up: Asks the server to give up a request that still waits.
        """
        with self._changed:
            self._is_ending = True
            under_way = list(self._under_way)
        for request in under_way:
            give_up(request)
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def lose(self) -> None:
        """The session is over: no answer comes any more."""
        with self._changed:
            self._is_ending = True
            self._under_way.clear()
            self._changed.notify_all()


MIN_SPOOLED_BYTES = 32 * 1024
"""Fewer values are sent along faster than they are written to a file and read again."""

OVERWRITES_TIMEOUT_S = 5.0
"""For overwrites under way when their session is closed: a copy, and two messages of a server that runs."""


class Filling(Protocol):
    """Who writes into rows in threads of the user's."""

    def close(self) -> None:
        """Waits until nothing is being written; nothing will be from then on."""


class LocalEnd:
    """Build it with :meth:`open`. Threads: safe.

    Attributes:
        root: The server's root folder, as this process sees it.
        is_read_only: Whether this process may not write the files.
        lacks_values: Whether it cannot read non-tensor values by itself.
    """

    def __init__(self, root: FilePath, *, lock: SessionLock | None, spool: Spool | None, lacks_values: bool) -> None:
        self.root = root
        self.is_read_only = lock is None
        self.lacks_values = lacks_values
        self._lock = lock
        self._spool = spool
        self._socket: SocketEnd | None = None
        self._stores = OpenStores(writes_values=False, is_read_only=self.is_read_only)
        self._claims: WeakSet[Filling] = WeakSet()
        self._claims_lock = Lock()
        self._is_over = False
        self._overwrites = Overwrites(str(root))
        self._welcomed: SimpleQueue[bool] = SimpleQueue()
        _ends.add(self)

    @classmethod
    def open(
        cls,
        welcome: control_pb2.Welcome,
        *,
        root: str | None,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_lost: Callable[[], None],
    ) -> LocalEnd:
        """Shows the server that this process sees its files.

        Args:
            welcome: The server's, with what it says of its root.
            root: Where this process sees that folder, if elsewhere than the server does.
            on_message: Called for every message, in a thread of its own, which also writes content in place.
            on_lost: Called at that thread's end.

        Raises:
            ConnectError: It does not see them, or may not use them. Says why.
            PeerLostError: The server does not let it in: most likely it knows no more of the session.
        """
        said = welcome.local
        folder = FilePath(root or said.root)
        _check_same(folder, said)
        lock = SessionLock.hold(folder / "sessions", said.lock_name)
        try:
            spool = None if lock is None else Spool(folder / "sessions", said.lock_name)
            # To read values is to write into a lock file, by process id.
            lacks_values = lock is None or not said.pid_namespace or said.pid_namespace != pid_namespace()
            end = cls(folder, lock=lock, spool=spool, lacks_values=lacks_values)
            end._attach(welcome, on_message, on_lost)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return end

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message. Raises ConnectError when the server is gone, or the message begins what must not begin any
        more."""
        if self._socket is None:
            raise ConnectError(address=str(self.root), reason="the local socket was closed")
        self._overwrites.begin(message)
        self._socket.send(message)

    def flush(self, timeout_s: float) -> None:
        """Waits until the server has what was sent, or so long; nothing can be sent any more."""
        if self._socket is not None:
            self._socket.flush(timeout_s)

    def look(self) -> None:
        """In the thread that brings messages, while it writes content in place: hands on what need not wait for it."""
        if self._socket is not None:
            self._socket.look()

    def store(self, name: str, uid: str, spec: Spec, *, structure: int = 0, path: str = "") -> MappedStore:
        """The store of this incarnation, mapped.

        Args:
            spec: Its whole structure.
            structure: Number of that structure, as the server says.
            path: Where it lies below the root, if not where its name says.

        Raises:
            TransferAbortedError: It was deleted or altered meanwhile.
            CorruptDataError: Its files are missing or damaged.
        """
        found = self._stores.find(uid)
        if found is not None and found.structure == structure:
            return found
        self._stores.forget_deleted()
        folder = self.root / (path or f"stores/{name}")
        ref = worker_pb2.StoreRef(uid=uid, folder=str(folder), fingerprint=spec.fingerprint, structure=structure)
        try:
            return self._stores.get(ref, spec)
        except (CorruptDataError, StoreNotFoundError) as error:
            if isinstance(error, CorruptDataError) and is_of(folder / GENERATION_FILE, uid=uid):
                raise
            reason = f"store {name!r} was deleted meanwhile"
            raise TransferAbortedError(transfer=0, reason=reason) from error

    def find_known(self, name: str, spec: Spec) -> MappedStore | None:
        """The store of this name and structure, if this client has read it before and it is still the same."""
        store = self._stores.find_granted(name)
        if store is None:
            self._stores.forget_deleted()
        return store if store is not None and store.spec.fingerprint == spec.fingerprint else None

    def forget_deleted(self) -> None:
        """Lets go of stores and versions that were deleted: while they are mapped, their space is not free."""
        self._stores.forget_deleted()
        drop_unlinked()

    def grant(self, store: MappedStore) -> None:
        """The server has let this client read a store: until it is deleted, its name means this one."""
        self._stores.grant(store)

    def spool(self, values: Sequence[Buffer]) -> tuple[int, int] | None:
        """Puts values, given in parts, where the worker fetches them; None: they are few, and ride in the request.

        Raises:
            CapacityError, InvalidRequestError: There is no room for them.
        """
        nbytes = sum(map(len, values))
        return None if self._spool is None or nbytes < MIN_SPOOLED_BYTES else self._spool.put(values, nbytes)

    def free(self, spooled: tuple[int, int]) -> None:
        """The values there were fetched, or will not be."""
        if self._spool is not None:
            self._spool.free(*spooled)

    def keep(self, claim: Filling) -> None:
        """Takes note of who fills rows by himself: the session is not over before he is closed.

        Raises:
            ConnectError: It is over.
        """
        with self._claims_lock:
            if self._is_over:
                raise ConnectError(address=str(self.root), reason="the session is over")
            self._claims.add(claim)

    def check_writable(self, what: str) -> None:
        """Raises NotSupportedError where this process may only read."""
        if self.is_read_only:
            reason = f"this process may not write the files in {self.root}; connect with transport='gloo' to write"
            raise NotSupportedError(feature=what, reason=reason)

    def end_overwrites(self) -> None:
        """Gives up the overwrites that wait, and waits for those under way, for some seconds; none begins any more.

        What is overwritten when the connection ends is lost, also where all of it was written. Does nothing in the
        thread that brings messages, which would wait for itself.
        """
        if self._socket is not None and not self._socket.is_reading_here:
            self._overwrites.end(self._give_up, OVERWRITES_TIMEOUT_S)

    def _give_up(self, request: int) -> None:
        with suppress(ConnectError):  # the session is over: nothing is to be given up
            self.send(control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=request)))

    def close(self) -> None:
        """Ends the connection; content that is being written now is written first. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def _attach(
        self,
        welcome: control_pb2.Welcome,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_lost: Callable[[], None],
    ) -> None:
        is_in = False

        def on_first(message: control_pb2.ServerMessage) -> None:
            nonlocal is_in
            if message.HasField("welcome"):
                is_in = True
                self._welcomed.put(True)
            else:
                on_message(message)
                self._overwrites.on_message(message)

        def on_end() -> None:
            self._overwrites.lose()
            with self._claims_lock:
                self._is_over, claims = True, list(self._claims)
            for claim in claims:
                claim.close()
            # Nothing more is written by this session: from here on its rows may go to others.
            if self._spool is not None:
                self._spool.close()
            if self._lock is not None:
                self._lock.release()
            self._welcomed.put(False)
            if is_in:  # else the session goes on without it
                on_lost()
            self._stores.close()

        self._socket = SocketEnd(self.root, on_message=on_first, on_end=on_end)
        attach = control_pb2.Attach(
            session=welcome.session,
            key=welcome.local.key,
            is_read_only=self.is_read_only,
            lacks_values=self.lacks_values,
        )
        self._socket.start()
        try:
            self.send(control_pb2.ClientMessage(attach=attach))
            was_let_in = self._welcomed.get(timeout=ATTACH_TIMEOUT_S)
        except (Empty, ConnectError):
            was_let_in = False
        if not was_let_in:
            self._socket.close()
            raise PeerLostError(peer="the server's local socket", reason="it did not let this client in")

    def _forget(self) -> None:
        """In a forked child: its copies of the lock and the socket must not outlive the parent's."""
        if self._lock is not None:
            self._lock.release()
        if self._socket is not None:
            self._socket.drop()


def _check_same(folder: FilePath, said: control_pb2.LocalRoot) -> None:
    """Raises ConnectError unless the folder is the server's: the same file, on the same mounted file system."""
    path = folder / "nonce"
    try:
        found = os.stat(path)
        nonce = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        reason = f"this process does not see the server's root folder there: {error.strerror}"
        raise ConnectError(address=str(folder), reason=reason) from error
    if nonce != said.nonce or (found.st_dev, found.st_ino) != (said.device, said.inode):
        raise ConnectError(address=str(folder), reason="the folder there is not the server's root, but another one")


_ends: weakref.WeakSet[LocalEnd] = weakref.WeakSet()


def _forget_all() -> None:
    for end in list(_ends):
        end._forget()


def _close_all() -> None:
    for end in list(_ends):
        end.end_overwrites()
        end.close()


os.register_at_fork(after_in_child=_forget_all)
# A thread that the interpreter's end meets inside torch takes the whole process with it.
atexit.register(_close_all)


def open_local(
    welcome: control_pb2.Welcome,
    *,
    transport: str,
    root: str | None,
    address: str,
    on_message: Callable[[control_pb2.ServerMessage], None],
    on_lost: Callable[[], None],
    machine: str | None = None,
) -> tuple[LocalEnd | None, str]:
    """The client's end of the local socket, where it sees the server's files; else why there is none.

    Args:
        transport: That was asked for: with ``"shm"`` there must be one.
        address: Of the server, for errors.
        root, on_message, on_lost: As of ``LocalEnd.open``.
        machine: Kind of processor; None is that of this machine.

    Raises:
        NotLocalError: Shared memory was asked for, and cannot be had.
        PeerLostError: It was asked for, and the server does not let this client in any more.
    """
    unordered = why_not_shared(platform.machine() if machine is None else machine)
    if unordered or not welcome.HasField("local"):
        error = ConnectError(address=address, reason=unordered or "the server runs on another machine")
    else:
        try:
            return LocalEnd.open(welcome, root=root, on_message=on_message, on_lost=on_lost), ""
        except PeerLostError as failure:
            if transport == "shm":
                raise
            return None, str(failure.fields["reason"])
        except ConnectError as failure:
            error = failure
    reason = str(error.fields["reason"])
    if transport == "shm":
        raise NotLocalError(address=address, reason=reason) from error
    return None, reason
