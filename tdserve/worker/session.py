"""One session of a data worker: mail, which lasts as long as it does, and one lane after the other for its orders."""

from __future__ import annotations

from collections.abc import Callable

from tdserve.base.errors import TransferAbortedError
from tdserve.transport.control_channel import MAX_SENT
from tdserve.v1 import worker_pb2
from tdserve.worker.lane import Lane, Perform, Surroundings
from tdserve.worker.mailbox import Mailbox


class WorkerSession:
    """Hands what comes for a session to its mailbox or its lane. Session 0 has no client: it does what concerns stores
    as a whole.

    Args:
        number: The session, as control names it.
        surroundings: Shared with the other sessions.
        perform: Carries out one order; what it raises becomes the order's Failure.
        is_quick: Whether an order takes no longer than to hand it to the lane's thread.

    Attributes:
        lane: That of the newest channel; a broken one is closed, and another takes its place.
    """

    def __init__(
        self,
        number: int,
        surroundings: Surroundings,
        perform: Perform,
        is_quick: Callable[[Lane, worker_pb2.Order], bool],
    ) -> None:
        self.number = number
        self.surroundings = surroundings
        self._perform = perform
        self._is_quick = is_quick
        self.mailbox = Mailbox(number, surroundings.report, self._answer)
        self.lane = self._make_lane(0)

    def put(self, order: worker_pb2.Order) -> None:
        """Has an order carried out; called by the thread that reads the socket."""
        kind = order.WhichOneof("body")
        if kind == "mail":
            # At once, in front of what moves: an answer may be what the client waits for to take content.
            if self.mailbox.send(order.mail):
                self.lane.queue(order)
        elif kind == "open_session" and order.open_session.is_mail:
            self.mailbox.open(order)
        elif kind == "rendezvous" and order.rendezvous.is_mail:
            self.mailbox.feed(order.rendezvous)
        else:
            self._put_in_lane(order, kind)

    def _put_in_lane(self, order: worker_pb2.Order, kind: str | None) -> None:
        if order.channel > self.lane.channel_number:
            self._replace_lane(order.channel)
        lane = self.lane
        if order.channel < lane.channel_number:
            if order.order:
                lane.refuse(order, TransferAbortedError(transfer=order.tag, reason="its channel was replaced"))
        elif kind == "close_channel":
            self._replace_lane(order.channel + 1)
        elif kind == "open_session":
            lane.open(order)
        elif kind == "rendezvous":
            lane.feed(order.rendezvous)
        elif lane.is_idle and self._is_quick(lane, order):
            lane.carry_out(order)
            if lane.num_sent >= 2 * MAX_SENT:
                lane.queue(worker_pb2.Order(mail=b""))
        else:
            lane.queue(order)

    def _replace_lane(self, channel_number: int) -> None:
        self.lane.close()
        self.lane = self._make_lane(channel_number)

    @property
    def is_busy(self) -> bool:
        """Whether there are orders that were not carried out."""
        return self.lane.is_busy

    def close(self) -> None:
        """Ends the session: its channels go, orders that wait fail."""
        self.lane.close()
        self.mailbox.close()

    def _make_lane(self, channel_number: int) -> Lane:
        return Lane(self.number, channel_number, self.surroundings, self._perform, reap_mail=self.mailbox.reap)

    def _answer(self, mail: bytes) -> bytes | None:
        """As of ``SmallReads.answer``; called by the thread that reads mail."""
        lane = self.lane
        send = lane.send_at_once if lane.may_send_at_once else None
        return self.surroundings.small_reads.answer(mail, send, channel_number=lane.channel_number)
