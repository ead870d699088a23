"""Relays of versions of weights: decides which client gets a version from which, introduces the two, and checks the
result.

The rule is ``tdserve.rules.fanout``. This module sends its decisions to the clients and reports their messages to it.
Content from a relay is accepted only if its checksums are those that the server has computed of the version: what a
client says of content that it has got from the server counts for no other client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError, DeadlineExceededError, InvalidRequestError, TDServeError
from tdserve.base.ids import make_secret
from tdserve.rules.fanout import MAX_TRIES, SERVER, Fanout, Placement
from tdserve.rules.weights import MIN_COMPARED_BYTES, VersionRecord
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.waiting import Waiters
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.session_limits import is_short
from tdserve.server.sessions.traffic import Traffic
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

MIN_RELAYED_BYTES = 256 * 1024
"""Smaller versions reach a hundred pullers in less time than it takes two of them to connect."""

MAX_LINE_S = 5.0
"""Longest wait of a puller for a relay with room; then the server sends the version, however busy it is."""

MAX_OWN_S = 2.0
"""Longest wait for checksums that are computed after all other work. Then others are ordered for the puller."""

REST_S = 10.0
"""Time without a hop after which no client need keep a version any longer."""

_LINE = "relays"

_log = logging.getLogger("tdserve.server")

MakeChecksums = Callable[[], Awaitable[bytes]]
"""Has the checksums of a content computed; b"" or an error if that cannot be done any more."""


@dataclass(eq=False)
class _Trees:
    """One weights store.

    Attributes:
        has_room: Wakes pullers that wait for a relay or for the server.
        num_waiting: Number of these pullers.
        nbytes: Size of each content of a version.
        checksums: Checksums of each content that were computed for its pullers.
        makers: How to have those of a content computed.
        making: Computations under way.
        resting: Timer that ends the trees once no hop is under way.
    """

    store: OpenedStore
    fanout: Fanout
    has_room: Waiters = field(default_factory=Waiters)
    num_waiting: int = 0
    nbytes: dict[Hashable, int] = field(default_factory=dict)
    checksums: dict[Hashable, bytes] = field(default_factory=dict)
    makers: dict[Hashable, MakeChecksums] = field(default_factory=dict)
    making: dict[Hashable, asyncio.Task[None]] = field(default_factory=dict)
    resting: asyncio.TimerHandle | None = None


@dataclass
class _Member:
    """A session that has asked for versions, and the uids of the stores of these."""

    session: ClientSession
    uids: set[str] = field(default_factory=set)


class Relays:
    """The fan-out trees of all weights stores.

    Args:
        traffic: Counts transfers from client to client.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._trees: dict[str, _Trees] = {}  # by uid
        self._members: dict[int, _Member] = {}  # by number of the session
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Returns the number of stores with a version that a client may pass on."""
        return len(self._trees)

    async def place(
        self,
        session: ClientSession,
        store: OpenedStore,
        version: VersionRecord,
        sent: Spec,
        asked: control_pb2.LatestRequest,
        deadline: Deadline,
        make_checksums: MakeChecksums,
    ) -> Placement | None:
        """Returns the source of a version for a puller; None: the server, without a hop. Waits while all sources are
        busy.

        Args:
            sent: Structure of the content that is sent.
            make_checksums: Computes the checksums of this content.

        Returns:
            A placement with a relay, which has been told to send it; or with the server, to be sent within ``sending``.
        """
        if not asked.relays or session.why_unlinked or sent.values or sent.nbytes < MIN_RELAYED_BYTES:
            return None
        trees = self._get_trees(store)
        trees.fanout.fanout = store.get_versions().fanout
        for each in asked.failed:
            trees.fanout.note_failure(session.number, each.hop, was_connected=each.was_connected)
        if asked.failed:
            self._on_moved(trees)
        self._members.setdefault(session.number, _Member(session)).uids.add(store.record.uid)
        content = (version.version, asked.dtype)

        def look() -> Placement | None:
            waiting, failed = trees.num_waiting, len(asked.failed)
            return trees.fanout.place(version.version, content, session.number, num_waiting=waiting, num_failed=failed)

        placed = look()
        if placed is None:
            # Pullers of one content wait in turn; one that relays have failed can have fewer of them than the others.
            line = (_LINE, content, session.number if asked.failed else SERVER)
            placed = await self._wait_in_line(session, trees, look, deadline, line)
        if placed is None:
            placed = trees.fanout.place(version.version, content, session.number, num_failed=MAX_TRIES)
        if placed is None or not placed.hop:
            return None
        trees.nbytes[content] = sent.nbytes  # set after the wait; from here on it is kept as long as the hop
        if trees.resting is not None:
            trees.resting.cancel()
            trees.resting = None
        if placed.relay != SERVER:
            placed = replace(placed, secret=make_secret())
            trees.makers[content] = make_checksums
            if not self._is_made_soon(trees, version.version, content):
                self._make_checksums(trees, content)  # while the content is on its way
            passing = control_pb2.PassOn(hop=placed.hop, kept=placed.kept, secret=placed.secret)
            self._send_order(placed.relay, control_pb2.RelayOrder(pass_on=passing))
        return placed

    @contextmanager
    def track_sending(self, store: OpenedStore, placed: Placement | None) -> Iterator[None]:
        """Runs a block in which the server sends a version to a puller; ends the puller's hop."""
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if placed is not None:
                trees = self._get_trees(store)
                trees.fanout.end(placed.hop, is_whole=is_whole)
                self._on_moved(trees)

    def forget_deleted(self, store: OpenedStore) -> None:
        """Forgets a store that is deleted or has moved away; if hops of it are under way, ``REST_S`` after the last of
        them has ended."""
        trees = self._trees.get(store.record.uid)
        if trees is not None and not trees.fanout.num_hops:
            del self._trees[store.record.uid]
            if trees.resting is not None:
                trees.resting.cancel()

    def announce(self, store: OpenedStore) -> None:
        """Reacts to a newer version: relays drop versions that no client will ask for any more."""
        trees = self._trees.get(store.record.uid)
        if trees is not None:
            self._on_moved(trees)

    def hand_on(self, session: ClientSession, entry: control_pb2.Rendezvous) -> None:
        """Passes a rendezvous entry of a hop on to its other end, if this session is one of its ends."""
        trees = self._find_trees(session, entry.hop)
        if trees is None or not is_short(entry):
            return
        ends = {trees.fanout.find_puller(entry.hop), trees.fanout.find_source(entry.hop)}
        if session.number in ends:
            for other in ends - {session.number, SERVER, None}:
                if other in self._members:
                    self._members[other].session.send(control_pb2.ServerMessage(rendezvous=entry))

    def on_report(self, session: ClientSession, report: control_pb2.RelayReport) -> None:
        """Handles a client's report: it holds a version's first part, or a hop has ended."""
        kind = report.WhichOneof("report")
        hop = getattr(report, kind or "holds")
        trees = self._find_trees(session, hop)
        if trees is None:
            return
        if kind == "holds":
            trees.fanout.note_holding(session.number, hop)
        elif kind == "ended" and trees.fanout.find_source(hop) == session.number:
            trees.fanout.note_sent(hop)
        elif kind == "ended" and trees.fanout.find_puller(hop) == session.number:
            trees.fanout.end(hop, is_whole=False)
        self._on_moved(trees)

    async def check_taken(
        self, session: ClientSession, request: int, asked: control_pb2.TakenRequest
    ) -> control_pb2.Done:
        """Checks the checksums of a version that a puller has received from a relay, and ends the hop.

        Raises:
            CorruptDataError: They are wrong. The puller asks again, and this relay is not given to clients any more.
            InvalidRequestError: No such hop to this client is under way.
            DeadlineExceededError: The right checksums are not known in time.
        """
        trees = self._find_trees(session, asked.hop)
        found = trees.fanout.find_content(asked.hop) if trees is not None else None
        if trees is None or found is None or trees.fanout.find_puller(asked.hop) != session.number:
            raise InvalidRequestError(argument="hop", reason=f"{asked.hop} is not under way to this client")
        store, nbytes = trees.store, trees.nbytes[found[1]]
        await inline_tasks.ensure_task()
        expected = await self._find_checksums(session, trees, *found, asked.timeout_s)
        if expected != asked.checksums:
            trees.fanout.note_failure(session.number, asked.hop, was_connected=True)
            self._on_moved(trees)
            path = f"version {found[0]} of {store.name!r}, passed on by another client"
            raise CorruptDataError(path=path, expected=expected.hex()[:64], actual=asked.checksums.hex()[:64])
        trees.fanout.end(asked.hop, is_whole=True)
        self._traffic.count_relayed(session.transport, nbytes)
        self._on_moved(trees)
        return control_pb2.Done()

    def on_session_ended(self, number: int) -> None:
        """Drops an ended session from the trees; pullers that receive from it are notified at once."""
        member = self._members.pop(number, None)
        for trees in self._list_trees(member):
            for orphan in trees.fanout.remove_session(number):
                puller = trees.fanout.find_puller(orphan.hop)
                if puller is not None:
                    self._send_order(puller, control_pb2.RelayOrder(lost=orphan.hop))
            self._on_moved(trees)

    async def _find_checksums(
        self, session: ClientSession, trees: _Trees, version: int, content: Hashable, timeout_s: float
    ) -> bytes:
        """Returns the checksums that a version must have; DeadlineExceededError if they are not known in time."""
        store = trees.store
        deadline = Deadline.after(timeout_s)

        def find() -> bytes | None:
            known = store.get_versions().get_checksums(version) if content == (version, 0) else None
            return known.content if known is not None else trees.checksums.get(content)

        if find() is None and content not in trees.making and self._is_made_soon(trees, version, content):
            with suppress(DeadlineExceededError):
                within = Deadline.after(min(timeout_s, MAX_OWN_S))
                await session.wait(store.waiters, find, within, lambda: "its own checksums")
        if find() is None:
            self._make_checksums(trees, content)

        def find_made() -> bytes | None:
            found = find()
            return b"" if found is None and content not in trees.making else found

        what = f"the checksums of version {version} of {store.name!r}"
        checksums = await session.wait(store.waiters, find_made, deadline, lambda: what)
        if not checksums:
            raise DeadlineExceededError(what=what, timeout_s=timeout_s)
        return checksums

    def _is_made_soon(self, trees: _Trees, version: int, content: Hashable) -> bool:
        """Returns whether a content has checksums, or the server computes them in any case."""
        versions = trees.store.get_versions()
        newest = versions.newest
        if content in trees.checksums:
            return True
        if content != (version, 0):  # converted
            return False
        is_newest = newest is not None and newest.version == version and newest.nbytes >= MIN_COMPARED_BYTES
        return versions.get_checksums(version) is not None or (is_newest and versions.is_worth_checksums(version))

    def _make_checksums(self, trees: _Trees, content: Hashable) -> None:
        """Has the checksums of a content computed, unless they are being computed."""
        make = trees.makers.get(content)
        if make is None or content in trees.making:
            return

        async def work() -> None:
            try:
                checksums = await make()
                if checksums:
                    trees.checksums[content] = checksums
            except TDServeError as error:  # its pullers request the version again
                _log.debug("no checksums of a version of %r: %s", trees.store.name, error)
            finally:
                del trees.making[content]
                trees.store.waiters.wake()

        trees.making[content] = asyncio.ensure_future(work())

    async def _wait_in_line(
        self,
        session: ClientSession,
        trees: _Trees,
        look: Callable[[], Placement | None],
        deadline: Deadline,
        line: Hashable,
    ) -> Placement | None:
        remaining_s = deadline.remaining_s if deadline.timeout_s else None  # 0 is no limit for a relay
        wait_s = MAX_LINE_S if remaining_s is None else min(remaining_s, MAX_LINE_S)
        trees.num_waiting += 1
        try:
            return await session.wait(
                trees.has_room,
                look,
                Deadline.after(wait_s),
                lambda: "a relay",
                line=line,
                give_back=lambda placed: trees.fanout.end(placed.hop, is_whole=False),
            )
        except DeadlineExceededError:
            return None
        finally:
            trees.num_waiting -= 1

    def _on_moved(self, trees: _Trees) -> None:
        """Reacts to the end of a hop: sources may have room, and older versions may have no more pullers."""
        trees.has_room.wake()
        store = trees.store
        newest = store.get_versions().newest
        self._release(trees, trees.fanout.forget(newest.version if newest is not None else 0))
        if not trees.fanout.num_hops and trees.resting is None:
            trees.resting = asyncio.get_running_loop().call_later(REST_S, self._list_rest, trees)

    def _list_rest(self, trees: _Trees) -> None:
        trees.resting = None
        self._release(trees, trees.fanout.drop_idle_trees())
        if not trees.fanout.num_hops:
            trees.nbytes.clear()
            trees.checksums.clear()
            trees.makers.clear()
            if trees.store.waiters.is_gone:
                self._trees.pop(trees.store.record.uid, None)

    def _release(self, trees: _Trees, released: list[Placement]) -> None:
        for each in released:
            self._send_order(each.relay, control_pb2.RelayOrder(forget=each.hop))
        live = trees.fanout.contents
        trees.nbytes = {content: nbytes for content, nbytes in trees.nbytes.items() if content in live}
        trees.checksums = {content: checksums for content, checksums in trees.checksums.items() if content in live}
        trees.makers = {content: make for content, make in trees.makers.items() if content in live}

    def _send_order(self, number: int, order: control_pb2.RelayOrder) -> None:
        member = self._members.get(number)
        if member is not None and not member.session.ended.is_set():
            member.session.send(control_pb2.ServerMessage(relay_order=order))

    def _get_trees(self, store: OpenedStore) -> _Trees:
        uid = store.record.uid
        trees = self._trees.get(uid)
        if trees is None:
            trees = self._trees[uid] = _Trees(store, Fanout(numbers=self._numbers))
        return trees

    def _list_trees(self, member: _Member | None) -> list[_Trees]:
        uids = () if member is None else member.uids
        return [self._trees[uid] for uid in uids if uid in self._trees]

    def _find_trees(self, session: ClientSession, hop: int) -> _Trees | None:
        """Returns the store of a hop, if this session has asked for a version of it."""
        stores = self._list_trees(self._members.get(session.number))
        return next((trees for trees in stores if trees.fanout.find_content(hop) is not None), None)
