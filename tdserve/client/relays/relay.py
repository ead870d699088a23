"""The relays of a session: the client keeps versions of weights and passes them on, as the server asks.

Each hop has a thread of its own. The user's calls return copies of what is kept here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread, current_thread

from tdserve.base.errors import ClosedError, PeerLostError, TDServeError
from tdserve.client.relays.kept_version import KeptVersion
from tdserve.client.relays.relay_hop import PULLER_RANK, RELAY_RANK, RelayHop, pass_on
from tdserve.messages.layout import Layout
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2

JOIN_TIMEOUT_S = 5.0
"""Timeout for the end of a thread whose hop was ended."""

MAX_EARLY = 64
"""Entries of hops that are not known yet, or are over: a pair has four, and a client opens few pairs at once."""

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
        self._kept: dict[int, KeptVersion] = {}  # by the hop that brought it
        self._hops: dict[int, RelayHop] = {}
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
        """Receives an entry of a hop's rendezvous, which may arrive before the answer that names the hop."""
        with self._lock:
            hop = self._hops.get(entry.hop)
            if hop is None:
                self._early.append(entry)
        if hop is not None:
            hop.feed(entry.key, entry.value)

    def open_hop(self, number: int, secret: bytes, *, is_puller: bool = True) -> RelayHop:
        """Returns a hop whose pair can be opened from now on; ``close_hop`` must follow.

        Args:
            number: Number of the hop.
            secret: Both ends prove that they have it.
            is_puller: Whether this client receives the version.

        Raises:
            ClosedError: The session has ended.
            PeerLostError: The session of the other end has ended.
        """
        rank = PULLER_RANK if is_puller else RELAY_RANK
        hop = RelayHop(number, rank, secret=secret, publish=self._publish, make_host=self._make_host)
        with self._lock:
            if self._is_closed:
                raise ClosedError(what="the session")
            if number in self._lost_early:
                raise PeerLostError(peer=hop.peer, reason="its session has ended")
            self._hops[number] = hop
            early = [entry for entry in self._early if entry.hop == number]
        for entry in early:
            hop.feed(entry.key, entry.value)
        return hop

    def close_hop(self, hop: RelayHop) -> None:
        """Ends a hop."""
        with self._lock:
            self._hops.pop(hop.number, None)
        hop.close()

    def give_up(self, hop: int) -> None:
        """Tells control that nothing more is sent or needed over a hop."""
        self._report(control_pb2.RelayReport(ended=hop))

    def keep(self, hop: int, layout: Layout, pool: BufferPool) -> KeptVersion:
        """Returns memory for the version that a hop brings, from which it is passed on as it arrives."""
        kept = KeptVersion(layout, pool.take(layout.nbytes), on_first=lambda: self._report_arrival(hop))
        with self._lock:
            if not self._is_closed:
                self._kept[hop] = kept
        return kept

    def forget(self, hop: int) -> None:
        """Drops the version that a hop brought; clients that are receiving it get no more of it."""
        with self._lock:
            kept = self._kept.pop(hop, None)
        if kept is not None:
            kept.drop()

    def close(self) -> None:
        """Ends all hops, and joins the threads of all of them. Idempotent."""
        with self._lock:
            self._is_closed = True
            hops, threads = list(self._hops.values()), list(self._threads)
            kept, self._kept = list(self._kept.values()), {}
        for each in kept:
            each.drop()
        for hop in hops:
            hop.cancel(ClosedError(what="the session"))
        for thread in threads:
            if thread is not current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _lose(self, number: int) -> None:
        with self._lock:
            hop = self._hops.get(number)
            if hop is None:  # like an entry, it may arrive before the answer
                self._lost_early.append(number)
        if hop is not None:
            hop.cancel(PeerLostError(peer=hop.peer, reason="its session has ended"))

    def _begin(self, order: control_pb2.PassOn) -> None:
        kept = self._kept.get(order.kept)
        try:
            if kept is None:
                raise PeerLostError(peer=f"hop {order.kept}", reason="nothing is kept of what came over it")
            hop = self.open_hop(order.hop, order.secret, is_puller=False)
        except TDServeError:
            self.give_up(order.hop)
            return
        self._start(f"tdserve-relay-{order.hop}", lambda: self._pass_on(hop, kept))

    def _pass_on(self, hop: RelayHop, kept: KeptVersion) -> None:
        try:
            pass_on(hop.connect(), kept)
        except TDServeError as error:  # the puller notices by itself and uses another source
            _log.debug("hop %d: %s", hop.number, error)
        finally:
            self.close_hop(hop)
            self.give_up(hop.number)

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

    def _report_arrival(self, hop: int) -> None:
        self._report(control_pb2.RelayReport(holds=hop))

    def _publish(self, hop: int, key: str, value: bytes) -> None:
        self._send_if_open(control_pb2.ClientMessage(rendezvous=control_pb2.Rendezvous(key=key, value=value, hop=hop)))

    def _report(self, report: control_pb2.RelayReport) -> None:
        self._send_if_open(control_pb2.ClientMessage(relay_report=report))

    def _send_if_open(self, message: control_pb2.ClientMessage) -> None:
        with suppress(TDServeError):  # the session is lost: the report is not needed any more
            self._send(message)
