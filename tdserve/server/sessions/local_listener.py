"""The local socket in the root folder, what is lent to clients that do not see it, and the sessions attached."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Callable

from tdserve.base.errors import NotSupportedError, PeerLostError, PermissionDeniedError
from tdserve.base.ids import check_store_name
from tdserve.control.lending import Lender, refuse_descriptors
from tdserve.control.local import SOCKET_NAME, LocalConnection, listen
from tdserve.rules.replay.allocation.shared_numbers import LOCAL_READERS
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import LocalClient
from tdserve.server.sessions.mover import Movers
from tdserve.server.sessions.register import Sessions
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.exchange import session_locks
from tdserve.store.roots.root import STORES, Root
from tdserve.store.rows import adopted
from tdserve.v1 import control_pb2

_log = logging.getLogger("tdserve.server")

_NOT_OWNER = 0o077
_OTHERS_READ = 0o004
_OTHERS_ENTER = 0o005


class LocalListener:
    """Attaches local clients to their sessions and passes their messages on.

    Args:
        root: The acquired root.
        sessions: The sessions of all clients.
        process_watch: Finds out whether a client's process is gone.
        make_movers: Makes the movers of an attached client.
        take: Serves a request.
    """

    def __init__(
        self,
        root: Root,
        sessions: Sessions,
        process_watch: ProcessWatch,
        make_movers: Callable[[ClientSession, LocalClient], Movers],
        take: Callable[[ClientSession, control_pb2.ClientMessage], None],
    ) -> None:
        self._root = root
        self._sessions = sessions
        self._process_watch = process_watch
        self._make_movers = make_movers
        self._take = take
        self._inside: dict[LocalConnection, tuple[ClientSession, LocalClient]] = {}
        self._free_places = sorted(LOCAL_READERS, reverse=True)
        self._places: dict[LocalConnection, int] = {}
        self._listening: asyncio.AbstractServer | None = None
        self._lender: Lender | None = None
        self._strangers: dict[LocalConnection, None] = {}
        self._connecting: set[asyncio.Task[object]] = set()

    async def open(self) -> None:
        """Starts to listen, and to lend if others may not enter the stores' folder: from one of its folders they would
        reach all. If no socket can be made, the clients concerned use the network."""
        try:
            self._listening = await listen(self._root.path, self._make_connection)
        except OSError as error:
            _log.warning("no local socket in %s: %s; local clients use the network", self._root.path, error)
            return
        try:
            if not (self._root.path / STORES).stat().st_mode & _NOT_OWNER:
                self._lender = Lender(self._root.nonce, self._lend)
                self._sessions.is_lending = True
        except (OSError, NotSupportedError) as error:
            _log.info("nothing is lent to local clients of other users: %s; they use the network", error)

    def close(self) -> None:
        """Stops listening and closes all connections."""
        if self._lender is not None:
            self._lender.close()
        if self._listening is not None:
            self._listening.close()
            (self._root.path / SOCKET_NAME).unlink(missing_ok=True)
        for connection in list(self._inside):
            connection.close()

    def _on_message(self, connection: LocalConnection, message: control_pb2.ClientMessage) -> None:
        if connection not in self._inside:
            self._attach(connection, message)
            return
        session, client = self._inside[connection]
        if message.HasField("written"):  # counts even at the end: rows that it does not mention may be half written
            client.on_written(message.request, message.written)
        elif session.ended.is_set():
            connection.close()
        else:
            self._take(session, message)

    def _on_lost(self, connection: LocalConnection) -> None:
        if connection in self._inside:
            session, _ = self._inside[connection]
            session.ended.set()
            connection.read_rest()
            del self._inside[connection]
            if connection in self._places:
                self._free_places.append(self._places.pop(connection))

    def _make_connection(self) -> LocalConnection:
        return LocalConnection(self._on_message, self._on_lost, self._strangers)

    def _lend(self, asked: control_pb2.Borrow, uid: int) -> int:
        """Returns a descriptor of a store's folder, whose files the borrower opens as far as their permissions let it;
        or a connection, over which it attaches to its session.

        Args:
            uid: User of the process that asks.

        Raises:
            PeerLostError: Its session has ended, or its key is another.
            NotSupportedError: Its user may not read the files, or they are not in the store's folder.
            PermissionDeniedError: Its token does not include the store.
        """
        session = self._sessions.find(asked.session)
        invited = None if session is None else session.invitation
        if session is None or invited is None or session.ended.is_set():
            raise PeerLostError(peer=f"session {asked.session}", reason="it has ended")
        if not hmac.compare_digest(asked.key, invited.key):
            raise PeerLostError(peer=f"session {asked.session}", reason="its key is another")
        is_other = uid != os.geteuid()
        if not asked.store:
            if is_other and not os.stat(self._root.nonce_path).st_mode & _OTHERS_READ:
                raise _make_closed_error()
            return self._connect()
        grant = session.caller.grant
        if not grant.has_store(check_store_name(asked.store)):
            raise PermissionDeniedError(role=grant.role.label, call="borrow", store=asked.store)
        return self._open_folder(asked.store, is_other=is_other)

    def _connect(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        refuse_descriptors(ours)
        connecting = asyncio.get_running_loop().connect_accepted_socket(self._make_connection, ours)
        task: asyncio.Task[object] = asyncio.ensure_future(connecting)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return theirs.detach()

    def _open_folder(self, name: str, *, is_other: bool) -> int:
        folder = self._root.store_folder(name)
        if (folder / adopted.FILE_NAME).exists():
            raise NotSupportedError(feature=f"lending {name!r}", reason="its files lie in a folder of a user")
        with convert_os_errors(folder):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if is_other and os.fstat(fd).st_mode & _OTHERS_ENTER != _OTHERS_ENTER:
            os.close(fd)
            raise _make_closed_error()
        return fd

    def _attach(self, connection: LocalConnection, message: control_pb2.ClientMessage) -> None:
        """Attaches a client to its session if it shows the session's key and, unless it only reads, holds its lock."""
        attach = message.attach
        session = self._sessions.find(attach.session)
        invited = None if session is None else session.invitation
        is_attached = session is not None and isinstance(session.connection, LocalClient)
        if session is None or invited is None or is_attached or session.ended.is_set():
            connection.close()
            return
        holds_lock = session_locks.is_held(self._root.sessions_folder, invited.lock_name)
        if not hmac.compare_digest(attach.key, invited.key) or not (attach.is_read_only or holds_lock):
            connection.close()
            return
        lock_name = "" if attach.is_read_only else invited.lock_name
        client = LocalClient(
            session.number,
            connection,
            attach,
            lock_name=lock_name,
            is_gone=self._process_watch.is_gone,
            sessions_folder=self._root.sessions_folder,
        )
        session.attach(client, self._make_movers(session, client))
        self._inside[connection] = session, client
        connection.let_in()
        welcome = control_pb2.Welcome(session=session.number, transport=session.transport)
        if lock_name and self._free_places:  # it counts the rows that it draws, so it must be able to write
            welcome.reader = self._places[connection] = self._free_places.pop()
        connection.send(control_pb2.ServerMessage(welcome=welcome))


def _make_closed_error() -> NotSupportedError:
    reason = "the server's umask denies the files to other users"
    return NotSupportedError(feature="lending files", reason=reason)
