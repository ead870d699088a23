"""A local client that claims rows of a table, for the tests of the server's side."""

from __future__ import annotations

from tdserve.client.local.local_writes import fill_rows
from tdserve.data.places import Places
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.claiming import Claiming
from tdserve.store.rows.claim_file import ClaimedRows, ClaimFile
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.unit.server.local_peer import LocalPeer, mapped
from tests.unit.server.replaying import rows
from tests.unit.server.world import World

WINDOW = 8
"""Rows that a client wishes to claim."""


class Claimant:
    """A client that may claim rows.

    Attributes:
        first_row: First row of its claim.
        file: Its claim file.
    """

    def __init__(self, claiming: Claiming, peer: LocalPeer, store: OpenedStore, world: World) -> None:
        claim = claiming.offer(peer.session, store, wish(store))
        assert claim is not None
        self.first_row = claim.first_row
        self.file = ClaimFile.open(world.root.path / claim.path)
        self._num = claim.num
        self._claiming = claiming
        self._peer = peer
        self._store = store

    def claim(self, num_rows: int) -> int:
        """Claims rows to fill; returns the first one."""
        first = self.file.claim(num_rows)
        assert first is not None
        return self.first_row + first

    def extend(self, request: int, start: int, num_rows: int = 3) -> bool:
        """Makes a whole extend; returns whether the server must be notified."""
        begin = self.claim(num_rows)
        self._store.get_generation_values()[begin : begin + num_rows] |= 1
        fill_rows(mapped(self._store), Places(begin), [capture(rows(start, num_rows))])
        return self.write(request, num_rows)

    def write(self, request: int, num_rows: int) -> bool:
        """Records that the last claimed rows are filled; returns whether the server must be notified."""
        return self.file.write(ClaimedRows(self._peer.session.client_id, request, num_rows))

    def tell(self, *, abandons: bool = False) -> None:
        """Reports that it has filled rows, or that it will not."""
        said = control_pb2.Claimed(uid=self._store.record.uid, num=self._num, abandons=abandons)
        self._claiming.on_claimed(said, self._peer.session.movers.writes.claim_holder)


def wish(store: OpenedStore, *, num_rows: int = 1, num_wished: int = WINDOW) -> control_pb2.ExtendRequest:
    """Returns an extend request of a client that prefers to claim rows."""
    return control_pb2.ExtendRequest(store=store.name, num_rows=num_rows, wished_claim=num_wished)


def plan(store: OpenedStore, num_rows: int) -> Reservation:
    """Reserves rows for another writer."""
    reservation = store.get_table().arrivals.reserve(num_rows)
    assert reservation is not None
    return reservation


def live(store: OpenedStore) -> list[int]:
    """Returns the rows that may be read."""
    store.catch_up()
    return [int(row) for row in store.get_table().state.list_live_rows()]


def num_reserved(store: OpenedStore) -> int:
    """Returns the number of rows that a writer may be filling."""
    store.catch_up()
    return int(store.get_table().info()["num_reserved"])


def restarted(world: World, name: str) -> OpenedStore:
    """Opens a table as after a restart of the server."""
    world.reopen()
    Claiming(world.stores, world.answers, traffic=world.traffic).restore()
    return world.stores.get(name)
