"""The calls of a cluster's client that know on which server a store is: moves and checkpoints.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

from collections.abc import Collection

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreNotFoundError, TDServeError
from tdserve.base.integers import check_integer
from tdserve.client.client import Client
from tdserve.client.cluster.moves.cluster_checkpoints import checkpoint_cluster, restore_cluster
from tdserve.client.cluster.moves.store_move import (
    REBALANCE_TIMEOUT_S,
    OnProgress,
    choose_refuge,
    explain_left,
    move_store,
)
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.placement_records import find_here
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.moves.checkpoint_restore import OnRestore, RestoreOptions
from tdserve.client.moves.checkpoint_writer import OnCheckpoint
from tdserve.client.moves.manifest import Checkpoint
from tdserve.client.moves.server_checkpoints import CHECKPOINT_TIMEOUT_S, Place
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.rules.placement import find_whole, name_splits


@leave_modes_in_calls
class ClusterMoves:
    """The part of a cluster's client that moves stores from server to server, and to a checkpoint and back.

    Attributes:
        cluster: What the client shares with its handles.
        members: The clients of the servers.
        directory: Where each store is.
    """

    def __init__(self, cluster: ClusterServers) -> None:
        self.cluster = cluster
        self.members, self.directory = cluster.members, cluster.directory

    # ------------------------------------------------------------ places

    def find_server(self, name: str) -> int:
        """Asks which server has a store, or will have it; of a shared one, its record. Returns its number."""
        self.directory.forget(name)
        return self.directory.find(name).server

    def rebalance(
        self,
        name: str,
        server: int | None = None,
        *,
        timeout_s: float = REBALANCE_TIMEOUT_S,
        on_progress: OnProgress = lambda _: None,
    ) -> int:
        """Moves a store, or a part of a shared one (``"name#2"``), to another server, while others use it.

        All of it moves: row numbers, generations, versions, counters, kept draws. Its files are copied while it serves.
        Then its clients wait while the last changes are copied, some tenths of a second, and continue at the other
        server; to what they have under way the move is what a restart of the server is. Changed rows are found by their
        generations; non-tensor values, and all of a keyed store, are compared, a second per gigabyte. A record of where
        it is stays behind. Moves of one store are made one at a time. Threads: safe.

        Args:
            server: Number of the server; None: the one that the name's hash chooses, as for a new store.
            timeout_s: For all of it. Nothing has moved when it is over.
            on_progress: Called after each request, with the bytes looked at and copied.

        Returns:
            The number of the server that has it now; nothing is done if it was there.

        Raises:
            NotSupportedError: It cannot move: an adopted store.
            StoreExistsError: The other server has a store of this name.
            DeadlineExceededError: A client has begun to write and did not end in time; nothing was moved.
            ConnectError: Its server, or the other one, does not answer, or was lost in the middle. This takes seconds,
                whatever the timeout; the store serves where it was, unless its own server was lost as it gave it away.
        """
        return move_store(self.cluster, name, server, on_progress=on_progress, deadline=Deadline.after(timeout_s))

    def list_stores_at(self, server: int) -> list[str]:
        """Lists the stores, and parts of shared ones, that a server has, without records of where stores are. Raises
        ConnectError within seconds if it does not answer."""
        client = self.members.get(check_integer("server", server, 0, maximum=len(self.members) - 1))
        self.members.check_answers(server, "whose stores are to be listed")
        names = [name for name in client.stores() if _is_there(client, name)]
        return [name for name in names if (whole := find_whole(name)) is None or name != name_splits(whole)]

    def choose_refuge(self, name: str, drained: int) -> int:
        """Returns the server that would have a store, or a part, if a server did not exist.

        Raises:
            WrongStateError: Every other server has a part of the same store.
            ConnectError: No other server that may have it answers.
        """
        return choose_refuge(self.cluster, name, drained)

    def drain(self, server: int, *, timeout_s: float = REBALANCE_TIMEOUT_S) -> list[str]:
        """Moves all stores, and parts of shared ones, away from a server, one after the other, as ``rebalance`` does.

        Each goes to the server that would have it if this one did not exist, nor those that do not answer. New stores
        still come to it: its number stays one of the cluster's.

        Args:
            timeout_s: For each store.

        Returns:
            Names of the stores that have moved.

        Raises:
            ConnectError: No server answers to which some stores can move. All others have moved.
            TDServeError: The first error of a store that could not move, with the names of all that could not; all
                others have moved.
        """
        moved: list[str] = []
        failures: dict[str, TDServeError] = {}
        for name in self.list_stores_at(server):
            try:
                self.rebalance(name, self.choose_refuge(name, server), timeout_s=timeout_s)
                moved.append(name)
            except TDServeError as error:
                if not isinstance(error, StoreNotFoundError) or _is_there(self.members.get(server), name):
                    failures[name] = error  # otherwise it was deleted meanwhile
        if failures:
            raise explain_left(failures, server)
        return moved

    # ------------------------------------------------------------ checkpoints

    def checkpoint(
        self,
        place: Place,
        *,
        keep: int | None = None,
        timeout_s: float = CHECKPOINT_TIMEOUT_S,
        on_progress: OnCheckpoint = lambda _: None,
    ) -> list[Checkpoint]:
        """Writes a checkpoint of each server, at the same time, to ``place/server-0`` and so on.

        Each has its server's stores at one moment; the moments of two servers may differ by a second or so. If a store
        has moved from one server to another between their moments, and none has it, all of them are written again.
        Arguments and errors as in ``Client.checkpoint``. Threads: safe.

        Raises:
            ConnectError: A server does not answer.
            WrongStateError: A store moved each time that checkpoints were written. None of these was kept.
        """
        deadline = Deadline.after(timeout_s)
        return checkpoint_cluster(
            self.members, self.directory, place, keep=keep, deadline=deadline, on_progress=on_progress
        )

    def restore(
        self,
        place: Place,
        *,
        checkpoint: str | None = None,
        names: Collection[str] | None = None,
        prefix: str = "",
        timeout_s: float = CHECKPOINT_TIMEOUT_S,
        on_progress: OnRestore = lambda _: None,
    ) -> list[str]:
        """Brings stores of a checkpoint of as many servers, or fewer, back, each to the server of its number.

        Args:
            place: As in ``checkpoint``.
            checkpoint: Id of one of its servers' checkpoints, with which those of the others are found that were
                written at the same time; None: the newest of all servers. Where each server writes its own, by
                schedule, None is the newest of each.
            names: Stores that are brought back, shared ones with all their parts; None: all.
            prefix: Put in front of the name of each.
            timeout_s: For all of it.
            on_progress: Called after each block.

        Returns:
            The names of the new stores.

        Raises:
            InvalidRequestError: The place has checkpoints of more servers, or no such checkpoint, or one was removed
                while it was read. Nothing was restored.
            TDServeError: As in ``Client.restore``; a name is looked for at all servers before anything is restored.
        """
        options = RestoreOptions(checkpoint, names, prefix, Deadline.after(timeout_s), on_progress)
        return restore_cluster(self.members, place, options)


def _is_there(client: Client, name: str) -> bool:
    """Returns whether a server has a store, and not only a record of where it is; it may have been deleted since it was
    listed."""
    found = find_here(client, name)
    return isinstance(found, StoreDescription) and found.kind != "placement"
