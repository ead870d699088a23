"""Decides which client gets a version of weights from which, so that the server need not send it to all. No I/O.

Pullers of one version form a *tree*. The first few get it from the server and are its roots. Later ones get it from
pullers that keep what they have received (*relays*), as soon as these have its first part. Each end sends to at most
``fanout`` others at once. If a relay fails a puller (stopped, killed, out of reach), the puller is sent to another one,
and finally to the server, whatever else the server has to do: so no puller waits for a relay for ever.

::

    place ──► hop ──note_holding──► the puller is a relay ──end──► it has all of it (or the hop has failed)
                 └─failed──► the relay is left alone, or the puller, whichever seems to be at fault
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

SERVER = 0
"""Stands for the server instead of the number of a session."""

AUTOMATIC_FANOUT = 4
"""Two would suffice for the last puller, but leave no relay if one dies; eight halves what a relay gives to each."""

AUTOMATIC_ABOVE = 8
"""Pullers of the last two versions above which there are trees. Fewer are served faster directly, since hops take time
to form."""

MAX_TRIES = 2
"""Relays that may fail one call before it goes to the server, and calls that may fail one relay before it is left
out."""


@dataclass(frozen=True)
class Placement:
    """The source of a version for a puller.

    Attributes:
        hop: Number of this decision; 0 if nothing follows it.
        relay: Session that sends it, or ``SERVER``.
        kept: Hop over which that session has received it.
        keeps: Whether the puller keeps it, to pass it on.
        secret: Secret that the two clients prove to each other; set by the caller that carries the decision out.
    """

    hop: int = 0
    relay: int = SERVER
    kept: int = 0
    keeps: bool = False
    secret: bytes = b""


@dataclass(eq=False)
class _RelayHop:
    """One puller's way to one version."""

    number: int
    puller: int
    source: int
    kept: int
    tree: _RelayTree
    is_over: bool = False
    has_failed: bool = False  # as its puller reports


class _Holding(IntEnum):
    """What a relay has of a version; it only gets more, and one that fails leaves its tree."""

    NOTHING = 0
    FIRST_PART = 1  # it can serve others
    WHOLE = 2  # and needs its own source no more


@dataclass(eq=False)
class _Relay:
    """A puller that keeps a version."""

    session: int
    hop: int
    source: int
    depth: int
    holding: _Holding = _Holding.NOTHING
    is_trusted: bool = True
    hops: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)  # pullers that could not connect to it


@dataclass(eq=False)
class _RelayTree:
    """The pullers of one content of a version."""

    version: int
    content: Hashable
    relays: dict[int, _Relay] = field(default_factory=dict)
    from_server: set[int] = field(default_factory=set)
    num_hops: int = 0  # that have not ended
    num_placed: int = 0


class Fanout:
    """Decides for one weights store.

    Args:
        fanout: Number of clients to which each end sends a version at once; 0 derives it from the number of pullers.
        numbers: Numbers for hops, so that those of several stores differ.
    """

    def __init__(self, fanout: int = 0, *, numbers: Iterator[int] | None = None) -> None:
        self.fanout = fanout
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._trees: dict[Hashable, _RelayTree] = {}
        self._hops: dict[int, _RelayHop] = {}
        self._pullers: dict[int, set[int]] = {}  # of the last two versions
        self._apart: set[tuple[int, int]] = set()  # pairs of sessions that cannot reach one another
        self._unconnected: dict[int, set[int]] = {}  # relays tried by pullers that have reached none

    def __repr__(self) -> str:
        relays = sum(len(tree.relays) for tree in self._trees.values())
        return f"<Fanout {self.limit}: {len(self._trees)} trees, {relays} relays, {self.num_hops} hops>"

    @property
    def limit(self) -> int:
        """Number of clients to which each end sends a version at once now; 0: there are no trees."""
        if self.fanout:
            return self.fanout
        return AUTOMATIC_FANOUT if len(set().union(*self._pullers.values())) > AUTOMATIC_ABOVE else 0

    @property
    def num_hops(self) -> int:
        """Number of hops that have not ended."""
        return sum(tree.num_hops for tree in self._trees.values())

    @property
    def contents(self) -> set[Hashable]:
        """Names of the contents that are under way, or kept by relays."""
        return {tree.content for tree in self._trees.values()}

    def place(
        self, version: int, content: Hashable, puller: int, *, num_waiting: int = 0, num_failed: int = 0
    ) -> Placement | None:
        """Returns the source of a version for a puller; None if it has to wait until a hop ends.

        Args:
            version: Its number.
            content: Name of its bytes: pullers of one version may get different ones.
            puller: Its session.
            num_waiting: Other pullers that wait to be placed.
            num_failed: Relays that have failed this call.
        """
        self._count(version, puller)
        limit = self.limit
        if not limit:
            return Placement()
        tree = self._trees.setdefault(content, _RelayTree(version, content))
        if num_failed >= MAX_TRIES or len(self._unconnected.get(puller, ())) >= MAX_TRIES:
            return self._add_hop(tree, puller, None, keeps=False)
        has_room = self._count_from_server(tree) < limit
        if (
            has_room
            and puller not in tree.relays
            and sum(relay.source == SERVER for relay in _iter_living(tree)) < limit
        ):
            return self._add_hop(tree, puller, None, keeps=True)
        free = [relay for relay in _iter_living(tree) if self._can_serve(tree, relay, puller)]
        if free:
            best = min(free, key=lambda relay: (relay.depth, len(relay.hops)))
            return self._add_hop(tree, puller, best, keeps=self._shall_keep(tree, puller, num_waiting))
        if has_room and not any(self._may_serve(tree, relay, puller) for relay in _iter_living(tree)):
            return self._add_hop(tree, puller, None, keeps=self._shall_keep(tree, puller, num_waiting))
        return None

    def find_puller(self, hop: int) -> int | None:
        """Returns the session that receives over a hop that has not ended."""
        found = self._hops.get(hop)
        return None if found is None or found.is_over else found.puller

    def find_source(self, hop: int) -> int | None:
        """Returns the session that sends over a hop that has not ended."""
        found = self._hops.get(hop)
        return None if found is None or found.is_over else found.source

    def is_from_server(self, hop: int, puller: int) -> bool:
        """Returns whether the server sent the version of a hop, ended or not, to this puller."""
        found = self._hops.get(hop)
        return found is not None and (found.source, found.puller) == (SERVER, puller)

    def find_content(self, hop: int) -> tuple[int, Hashable] | None:
        """Returns the version of a hop, ended or not, and the name of its bytes; None for unknown hops."""
        found = self._hops.get(hop)
        return None if found is None else (found.tree.version, found.tree.content)

    def note_holding(self, session: int, hop: int) -> None:
        """Notes that a puller that keeps a version has its first part."""
        found = self._hops.get(hop)
        relay = found.tree.relays.get(session) if found is not None else None
        if relay is not None and relay.hop == hop:
            relay.holding = max(relay.holding, _Holding.FIRST_PART)

    def note_sent(self, hop: int) -> None:
        """Notes that a relay sends nothing more over a hop: it has room for another puller, whatever this one
        reports."""
        found = self._hops.get(hop)
        source = found.tree.relays.get(found.source) if found is not None else None
        if source is not None:
            source.hops.discard(hop)

    def end(self, hop: int, *, is_whole: bool) -> None:
        """Ends a hop: its puller has the whole version, or one of its ends has given up."""
        found = self._hops.get(hop)
        if found is None or found.is_over:
            return
        found.is_over = True
        tree = found.tree
        tree.num_hops -= 1
        tree.from_server.discard(hop)
        source, relay = tree.relays.get(found.source), tree.relays.get(found.puller)
        if source is not None:
            source.hops.discard(hop)
            if is_whole:
                source.unreached.clear()
                self._unconnected.pop(found.puller, None)
        if relay is not None and relay.hop == hop:
            if is_whole:
                relay.holding = _Holding.WHOLE
            else:  # it drops what it has, and pullers that get it from there notice
                del tree.relays[found.puller]

    def note_failure(self, puller: int, hop: int, *, was_connected: bool) -> None:
        """Notes that a puller gives a hop up: it could not reach the relay, or receives nothing, or nothing valid,
        from it.

        If a pair did not connect, either end may be the reason: one that has failed with several is left out.
        """
        found = self._hops.get(hop)
        if found is None or found.puller != puller or found.source == SERVER or found.has_failed:
            return
        found.has_failed = True
        self.end(hop, is_whole=False)
        relay = found.tree.relays.get(found.source)
        if was_connected:
            if relay is not None and relay.hop == found.kept:
                relay.is_trusted = False
            return
        self._apart.add((found.source, puller))
        self._unconnected.setdefault(puller, set()).add(found.source)
        if relay is not None:
            relay.unreached.add(puller)
            relay.is_trusted = relay.is_trusted and len(relay.unreached) < MAX_TRIES

    def remove_session(self, session: int) -> list[Placement]:
        """Removes a session that has ended.

        Returns:
            Hops whose pullers get nothing more from it, as placements.
        """
        for tree in list(self._trees.values()):
            tree.relays.pop(session, None)
        orphans = []
        for hop in list(self._hops.values()):
            if hop.is_over:
                continue
            if hop.puller == session:
                self.end(hop.number, is_whole=False)
            elif hop.source == session:
                orphans.append(Placement(hop.number, session))
        self._apart = {pair for pair in self._apart if session not in pair}
        self._unconnected.pop(session, None)
        for pullers in self._pullers.values():
            pullers.discard(session)
        return orphans

    def forget(self, newest: int) -> list[Placement]:
        """Drops trees of versions before ``newest`` over which nothing moves any more.

        Returns:
            Relays that need not keep theirs any longer: session and hop.
        """
        return self._cut(lambda tree: tree.version < newest)

    def drop_idle_trees(self) -> list[Placement]:
        """Drops every tree over which nothing moves; later pullers begin another. Returns as ``forget``."""
        return self._cut(lambda tree: True)

    def _cut(self, is_meant: Callable[[_RelayTree], bool]) -> list[Placement]:
        released = []
        for tree in list(self._trees.values()):
            if tree.num_hops or not is_meant(tree):
                continue
            del self._trees[tree.content]
            released += [Placement(relay.hop, relay.session) for relay in tree.relays.values()]
            for number in [hop.number for hop in self._hops.values() if hop.tree is tree]:
                del self._hops[number]
        return released

    def _count(self, version: int, puller: int) -> None:
        self._pullers.setdefault(version, set()).add(puller)
        for old in sorted(self._pullers)[:-2]:
            del self._pullers[old]

    def _add_hop(self, tree: _RelayTree, puller: int, relay: _Relay | None, *, keeps: bool) -> Placement:
        number = next(self._numbers)
        source, kept = (SERVER, 0) if relay is None else (relay.session, relay.hop)
        self._hops[number] = _RelayHop(number, puller, source, kept, tree)
        tree.num_hops += 1
        tree.num_placed += 1
        if relay is None:
            tree.from_server.add(number)
        else:
            relay.hops.add(number)
        if keeps:
            tree.relays[puller] = _Relay(puller, number, source, 1 if relay is None else relay.depth + 1)
        return Placement(number, source, kept, keeps)

    def _shall_keep(self, tree: _RelayTree, puller: int, num_waiting: int) -> bool:
        """Returns whether there are too few relays for all expected pullers, at ``limit`` each."""
        if puller in tree.relays:
            return False  # it asks again; what it has, or gets, is already passed on
        before = self._pullers.get(max((v for v in self._pullers if v < tree.version), default=0), ())
        num_expected = max(len(before), tree.num_placed + num_waiting + 1)
        return sum(1 for _ in _iter_living(tree)) * self.limit < num_expected - 1

    def _count_from_server(self, tree: _RelayTree) -> int:
        """Returns the number of pullers to which the server sends now, except those that others have found stopped or
        slow."""
        pullers = (tree.relays.get(self._hops[hop].puller) for hop in tree.from_server)
        return sum(relay is None or relay.is_trusted for relay in pullers)

    def _may_serve(self, tree: _RelayTree, relay: _Relay, puller: int) -> bool:
        """Returns whether a relay will eventually have room for this puller."""
        if relay.session == puller or (relay.session, puller) in self._apart:
            return False
        while relay.holding is not _Holding.WHOLE:  # a version cannot go back to the puller that it comes from
            if relay.source == puller:
                return False
            above = tree.relays.get(relay.source)
            if above is None:
                break
            relay = above
        return True

    def _can_serve(self, tree: _RelayTree, relay: _Relay, puller: int) -> bool:
        return (
            relay.holding >= _Holding.FIRST_PART
            and len(relay.hops) < self.limit
            and self._may_serve(tree, relay, puller)
        )


def _iter_living(tree: _RelayTree) -> Iterator[_Relay]:
    """Yields the relays that are not known to be stopped, slow or out of reach."""
    return (relay for relay in tree.relays.values() if relay.is_trusted)
