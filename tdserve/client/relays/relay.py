"""The relays of a session: the client keeps versions of weights and passes them on, as the server asks.

Each link has a thread of its own. The user's calls return copies of what is kept here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread, current_thread

from tdserve.base.errors import ClosedError, PeerLostError, TDServeError
from tdserve.client.relays.kept_version import KeptVersion
from tdserve.client.relays.relay_link import PULLER_RANK, RELAY_RANK, RelayLink, pass_on
from tdserve.messages.layout import Layout
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2

JOIN_TIMEOUT_S = 5.0
"""Timeout for the end of a thread whose link was ended."""

MAX_EARLY = 64
"""Entries of links that are not known yet, or are over: a pair has four, and a client opens few pairs at once."""

_log = logging.getLogger("tdserve.client")


class SessionRelays:
    """The relays of one session. Threads: safe; only the thread that reads the stream calls ``on_order`` and ``feed``.

    Args:
        send: Sends a message over the session.
        make_host: Returns the address of the interface at which other clients reach this one.
    """

    def __init__(self, send: Callable[[control_pb2.ClientMessage], None], make_host: Callable[[], str]) -> None:
        self._send = send
        self._make_host = make_host
        self._lock = Lock()
        self._is_closed = False
        self._kept: dict[int, KeptVersion] = {}  # by the link that brought it
        self._links: dict[int, RelayLink] = {}
        self._early: deque[control_pb2.Rendezvous] = deque(maxlen=MAX_EARLY)
        self._lost_early: deque[int] = deque(maxlen=MAX_EARLY)
        self._threads: set[Thread] = set()

    @property
    def num_kept(self) -> int:
        """Versions that are kept now."""
        return len(self._kept)

    def on_order(self, order: control_pb2.RelayOrder) -> None:
        """Carries out an order of control; does not block."""
        kind = order.WhichOneof("order")
        if kind == "pass_on":
            self._begin(order.pass_on)
        elif kind == "forget":
            self.forget(order.forget)
        elif kind == "lost":
            self._lose(order.lost)

    def feed(self, entry: control_pb2.Rendezvous) -> None:
        """Receives an entry of a link's rendezvous, which may arrive before the answer that names the link."""
        with self._lock:
            link = self._links.get(entry.link)
            if link is None:
                self._early.append(entry)
        if link is not None:
            link.feed(entry.key, entry.value)

    def open_link(self, number: int, secret: bytes, *, is_puller: bool = True) -> RelayLink:
        """Returns a link whose pair can be opened from now on; ``close_link`` must follow.

        Args:
            number: Number of the link.
            secret: Both ends prove that they have it.
            is_puller: Whether this client receives the version.

        Raises:
            ClosedError: The session has ended.
            PeerLostError: The session of the other end has ended.
        """
        rank = PULLER_RANK if is_puller else RELAY_RANK
        link = RelayLink(number, rank, secret=secret, publish=self._publish, make_host=self._make_host)
        with self._lock:
            if self._is_closed:
                raise ClosedError(what="the session")
            if number in self._lost_early:
                raise PeerLostError(peer=link.peer, reason="its session has ended")
            self._links[number] = link
            early = [entry for entry in self._early if entry.link == number]
        for entry in early:
            link.feed(entry.key, entry.value)
        return link

    def close_link(self, link: RelayLink) -> None:
        """Ends a link."""
        with self._lock:
            self._links.pop(link.number, None)
        link.close()

    def give_up(self, link: int) -> None:
        """Tells control that nothing more is sent or needed over a link."""
        self._report(control_pb2.RelayReport(ended=link))

    def keep(self, link: int, layout: Layout, pool: BufferPool) -> KeptVersion:
        """Returns memory for the version that a link brings, from which it is passed on as it arrives."""
        kept = KeptVersion(layout, pool.take(layout.nbytes), on_first=lambda: self._report_arrival(link))
        with self._lock:
            if not self._is_closed:
                self._kept[link] = kept
        return kept

    def forget(self, link: int) -> None:
        """Drops the version that a link brought; clients that are receiving it get no more of it."""
        with self._lock:
            kept = self._kept.pop(link, None)
        if kept is not None:
            kept.drop()

    def close(self) -> None:
        """Ends all links, and joins the threads of all of them. Idempotent."""
        with self._lock:
            self._is_closed = True
            links, threads = list(self._links.values()), list(self._threads)
            kept, self._kept = list(self._kept.values()), {}
        for each in kept:
            each.drop()
        for link in links:
            link.cancel(ClosedError(what="the session"))
        for thread in threads:
            if thread is not current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _lose(self, number: int) -> None:
        with self._lock:
            link = self._links.get(number)
            if link is None:  # like an entry, it may arrive before the answer
                self._lost_early.append(number)
        if link is not None:
            link.cancel(PeerLostError(peer=link.peer, reason="its session has ended"))

    def _begin(self, order: control_pb2.PassOn) -> None:
        kept = self._kept.get(order.kept)
        try:
            if kept is None:
                raise PeerLostError(peer=f"link {order.kept}", reason="nothing is kept of what came over it")
            link = self.open_link(order.link, order.secret, is_puller=False)
        except TDServeError:
            self.give_up(order.link)
            return
        self._start(f"tdserve-relay-{order.link}", lambda: self._pass_on(link, kept))

    def _pass_on(self, link: RelayLink, kept: KeptVersion) -> None:
        try:
            pass_on(link.connect(), kept)
        except TDServeError as error:  # the puller notices by itself and uses another source
            _log.debug("link %d: %s", link.number, error)
        finally:
            self.close_link(link)
            self.give_up(link.number)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 (outermost frame of the thread)
                _log.exception("%s failed", name)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = Thread(target=run, name=name, daemon=True)
        with self._lock:
            if self._is_closed:
                return
            self._threads.add(thread)
            thread.start()

    def _report_arrival(self, link: int) -> None:
        self._report(control_pb2.RelayReport(holds=link))

    def _publish(self, link: int, key: str, value: bytes) -> None:
        self._send_if_open(
            control_pb2.ClientMessage(rendezvous=control_pb2.Rendezvous(key=key, value=value, link=link))
        )

    def _report(self, report: control_pb2.RelayReport) -> None:
        self._send_if_open(control_pb2.ClientMessage(relay_report=report))

    def _send_if_open(self, message: control_pb2.ClientMessage) -> None:
        with suppress(TDServeError):  # the session is lost: the report is not needed any more
            self._send(message)
