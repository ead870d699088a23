"""Who gets a version of weights from whom, so that the server need not send it to everybody. Touches nothing.

Pullers of one version form a *tree*: the first few get it from the server and are its roots, further ones from pullers
that keep what they have got (*relays*), as soon as these have the first part of it. Each end sends to at most
``fanout`` others at once. A puller that its relay fails (stopped, killed, out of reach) is sent to another one, and in
the end to the server, whatever the server has to do then: so nobody waits for a relay for ever.

::

    place ──► link ──holds──► the puller is a relay ──end──► it has all of it (or the link has failed)
                 └─failed──► the relay is left alone, or the puller, whoever seems to be at fault
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

SERVER = 0
"""Stands for the server where the number of a session is asked for."""

AUTOMATIC_FANOUT = 4
"""Two would do for the last puller, and leaves no relay for one that dies; eight halves what a relay gives to each."""

AUTOMATIC_ABOVE = 8
"""Pullers of the last two versions. Fewer are served sooner than pairs of them are formed."""

MAX_TRIES = 2
"""Relays that fail one call before it goes to the server, and calls that fail one relay before it is left alone."""


@dataclass(frozen=True)
class Placement:
    """From whom a puller gets a version.

    Attributes:
        link: Names this decision from now on; 0 where nothing more is said of it.
        relay: Session that sends it, or ``SERVER``.
        kept: Link over which that session has got it.
        keeps: Whether the puller shall keep it, to pass it on.
        secret: What the two clients prove to each other; given by whoever carries the decision out.
    """

    link: int = 0
    relay: int = SERVER
    kept: int = 0
    keeps: bool = False
    secret: bytes = b""


@dataclass(eq=False)
class _Link:
    """One puller's way to one version."""

    number: int
    puller: int
    source: int
    kept: int
    tree: _Tree
    is_over: bool = False
    has_failed: bool = False  # as its puller says


@dataclass(eq=False)
class _Relay:
    """A puller that keeps a version."""

    session: int
    link: int
    source: int
    depth: int
    is_ready: bool = False
    is_whole: bool = False
    is_trusted: bool = True
    links: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)  # pullers that could not connect to it


@dataclass(eq=False)
class _Tree:
    """The pullers of one content of a version."""

    version: int
    content: Hashable
    relays: dict[int, _Relay] = field(default_factory=dict)
    from_server: set[int] = field(default_factory=set)
    num_links: int = 0  # that are not over
    num_placed: int = 0


class Fanout:
    """Decides for one weights store.

    Args:
        fanout: To how many each end sends a version at once; 0 lets the number of pullers decide.
        numbers: Of links, where those of several stores are to differ.
    """

    def __init__(self, fanout: int = 0, *, numbers: Iterator[int] | None = None) -> None:
        self.fanout = fanout
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._trees: dict[Hashable, _Tree] = {}
        self._links: dict[int, _Link] = {}
        self._pullers: dict[int, set[int]] = {}  # of the last two versions
        self._apart: set[tuple[int, int]] = set()  # pairs of sessions that cannot reach one another
        self._unconnected: dict[int, set[int]] = {}  # of pullers that have reached nobody: whom they have tried

    def __repr__(self) -> str:
        relays = sum(len(tree.relays) for tree in self._trees.values())
        return f"<Fanout {self.limit}: {len(self._trees)} trees, {relays} relays, {self.num_links} links>"

    @property
    def limit(self) -> int:
        """To how many each end sends a version at once now; 0: there are no trees."""
        if self.fanout:
            return self.fanout
        return AUTOMATIC_FANOUT if len(set().union(*self._pullers.values())) > AUTOMATIC_ABOVE else 0

    @property
    def num_links(self) -> int:
        """Links that are not over."""
        return sum(tree.num_links for tree in self._trees.values())

    @property
    def contents(self) -> set[Hashable]:
        """Names of the bytes that are on their way, or kept by relays."""
        return {tree.content for tree in self._trees.values()}

    def place(
        self, version: int, content: Hashable, puller: int, *, num_waiting: int = 0, num_failed: int = 0
    ) -> Placement | None:
        """Says from whom a puller gets a version; None when it has to wait until a link is over.

        Args:
            version: Its number.
            content: Names its bytes: pullers of one version may get different ones of it.
            puller: Its session.
            num_waiting: Pullers that wait to be placed, this one not counted.
            num_failed: Relays that have failed this call.
        """
        self._count(version, puller)
        limit = self.limit
        if not limit:
            return Placement()
        tree = self._trees.setdefault(content, _Tree(version, content))
        if num_failed >= MAX_TRIES or len(self._unconnected.get(puller, ())) >= MAX_TRIES:
            return self._join(tree, puller, None, keeps=False)
        has_room = self._num_from_server(tree) < limit
        if has_room and puller not in tree.relays and sum(relay.source == SERVER for relay in _alive(tree)) < limit:
            return self._join(tree, puller, None, keeps=True)
        free = [relay for relay in _alive(tree) if self._can_serve(tree, relay, puller)]
        if free:
            best = min(free, key=lambda relay: (relay.depth, len(relay.links)))
            return self._join(tree, puller, best, keeps=self._shall_keep(tree, puller, num_waiting))
        if has_room and not any(self._may_serve(tree, relay, puller) for relay in _alive(tree)):
            return self._join(tree, puller, None, keeps=self._shall_keep(tree, puller, num_waiting))
        return None

    def puller_of(self, link: int) -> int | None:
        """The session that gets a version over a link which is not over."""
        found = self._links.get(link)
        return None if found is None or found.is_over else found.puller

    def source_of(self, link: int) -> int | None:
        """The session that sends over a link which is not over."""
        found = self._links.get(link)
        return None if found is None or found.is_over else found.source

    def came_from_server(self, link: int, puller: int) -> bool:
        """Whether the server sent it to this puller, over or not."""
        found = self._links.get(link)
        return found is not None and (found.source, found.puller) == (SERVER, puller)

    def content_of(self, link: int) -> tuple[int, Hashable] | None:
        """The version that goes over a link, over or not, and the name of its bytes; None of unknown links."""
        found = self._links.get(link)
        return None if found is None else (found.tree.version, found.tree.content)

    def holds(self, session: int, link: int) -> None:
        """A puller that keeps a version has the first part of it."""
        found = self._links.get(link)
        relay = found.tree.relays.get(session) if found is not None else None
        if relay is not None and relay.link == link:
            relay.is_ready = True

    def passed(self, link: int) -> None:
        """A relay sends nothing more over a link: it has room for another puller, whatever this one says."""
        found = self._links.get(link)
        source = found.tree.relays.get(found.source) if found is not None else None
        if source is not None:
            source.links.discard(link)

    def end(self, link: int, *, is_whole: bool) -> None:
        """A link is over: its puller has all of the version, or one of its ends has given up."""
        found = self._links.get(link)
        if found is None or found.is_over:
            return
        found.is_over = True
        tree = found.tree
        tree.num_links -= 1
        tree.from_server.discard(link)
        source, relay = tree.relays.get(found.source), tree.relays.get(found.puller)
        if source is not None:
            source.links.discard(link)
            if is_whole:
                source.unreached.clear()
                self._unconnected.pop(found.puller, None)
        if relay is not None and relay.link == link:
            relay.is_ready = relay.is_whole = is_whole
            if not is_whole:  # it lets go of what it has got, and whoever gets it from there notices
                del tree.relays[found.puller]

    def failed(self, puller: int, link: int, *, was_connected: bool) -> None:
        """A puller gives a link up: it could not reach the relay, or nothing (or nothing right) comes from it.

        Of a pair that did not connect either end may be the reason: who has failed with several is left alone.
        """
        found = self._links.get(link)
        if found is None or found.puller != puller or found.source == SERVER or found.has_failed:
            return
        found.has_failed = True
        self.end(link, is_whole=False)
        relay = found.tree.relays.get(found.source)
        if was_connected:
            if relay is not None and relay.link == found.kept:
                relay.is_trusted = False
            return
        self._apart.add((found.source, puller))
        self._unconnected.setdefault(puller, set()).add(found.source)
        if relay is not None:
            relay.unreached.add(puller)
            relay.is_trusted = relay.is_trusted and len(relay.unreached) < MAX_TRIES

    def lose(self, session: int) -> list[Placement]:
        """A session has ended.

        Returns:
            Links whose pullers get nothing more from it, as placements.
        """
        for tree in list(self._trees.values()):
            tree.relays.pop(session, None)
        orphans = []
        for link in list(self._links.values()):
            if link.is_over:
                continue
            if link.puller == session:
                self.end(link.number, is_whole=False)
            elif link.source == session:
                orphans.append(Placement(link.number, session))
        self._apart = {pair for pair in self._apart if session not in pair}
        self._unconnected.pop(session, None)
        for pullers in self._pullers.values():
            pullers.discard(session)
        return orphans

    def forget(self, newest: int) -> list[Placement]:
        """Forgets trees of versions before ``newest`` over which nothing moves any more.

        Returns:
            Relays that need not keep theirs any longer: session and link.
        """
        return self._cut(lambda tree: tree.version < newest)

    def rest(self) -> list[Placement]:
        """Forgets every tree over which nothing moves: who comes later begins another. Returns as ``forget``."""
        return self._cut(lambda tree: True)

    def _cut(self, is_meant: Callable[[_Tree], bool]) -> list[Placement]:
        released = []
        for tree in list(self._trees.values()):
            if tree.num_links or not is_meant(tree):
                continue
            del self._trees[tree.content]
            released += [Placement(relay.link, relay.session) for relay in tree.relays.values()]
            for number in [link.number for link in self._links.values() if link.tree is tree]:
                del self._links[number]
        return released

    def _count(self, version: int, puller: int) -> None:
        self._pullers.setdefault(version, set()).add(puller)
        for old in sorted(self._pullers)[:-2]:
            del self._pullers[old]

    def _join(self, tree: _Tree, puller: int, relay: _Relay | None, *, keeps: bool) -> Placement:
        number = next(self._numbers)
        source, kept = (SERVER, 0) if relay is None else (relay.session, relay.link)
        self._links[number] = _Link(number, puller, source, kept, tree)
        tree.num_links += 1
        tree.num_placed += 1
        if relay is None:
            tree.from_server.add(number)
        else:
            relay.links.add(number)
        if keeps:
            tree.relays[puller] = _Relay(puller, number, source, 1 if relay is None else relay.depth + 1)
        return Placement(number, source, kept, keeps)

    def _shall_keep(self, tree: _Tree, puller: int, num_waiting: int) -> bool:
        """Whether there are not enough relays for all pullers that are to be expected, each ``limit`` at once."""
        if puller in tree.relays:
            return False  # it asks once more; what it has, or gets, is passed on already
        before = self._pullers.get(max((v for v in self._pullers if v < tree.version), default=0), ())
        num_expected = max(len(before), tree.num_placed + num_waiting + 1)
        return sum(1 for _ in _alive(tree)) * self.limit < num_expected - 1

    def _num_from_server(self, tree: _Tree) -> int:
        """Pullers to which the server sends now, but for those that are stopped or slow, as others have found out."""
        pullers = (tree.relays.get(self._links[link].puller) for link in tree.from_server)
        return sum(relay is None or relay.is_trusted for relay in pullers)

    def _may_serve(self, tree: _Tree, relay: _Relay, puller: int) -> bool:
        """Whether a relay will, sooner or later, have room for this puller."""
        if relay.session == puller or (relay.session, puller) in self._apart:
            return False
        while not relay.is_whole:  # what comes from the puller itself cannot go to it
            if relay.source == puller:
                return False
            above = tree.relays.get(relay.source)
            if above is None:
                break
            relay = above
        return True

    def _can_serve(self, tree: _Tree, relay: _Relay, puller: int) -> bool:
        return relay.is_ready and len(relay.links) < self.limit and self._may_serve(tree, relay, puller)


def _alive(tree: _Tree) -> Iterator[_Relay]:
    """Relays that are not known to be stopped, slow or out of reach."""
    return (relay for relay in tree.relays.values() if relay.is_trusted)
