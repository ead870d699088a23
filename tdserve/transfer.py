"""The life of one transfer, and the memory of requests that were answered. Rules alone; no bytes are moved here.

::

    PLANNED ──offer──► OFFERED ──move──► MOVING ──complete──► COMPLETE
       └──────abort───────┴──────abort─────┴──────abort──────► ABORTED

Everything that changes a transfer's state stands in ``TRANSITIONS``; an event that has no entry there is refused, and
the state stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from tdserve.errors import InvalidRequestError, RemoteProtocolError, WrongStateError


class TransferState(Enum):
    """Where a transfer is."""

    PLANNED = "planned"  # asked for; rows or a version may still have to be waited for
    OFFERED = "offered"  # granted: both ends know the exact sizes
    MOVING = "moving"  # bytes are under way, inline or over the data transport
    COMPLETE = "complete"  # content arrived whole
    ABORTED = "aborted"  # given up; what was being filled is undefined


class TransferEvent(Enum):
    """What happens to a transfer."""

    OFFER = "offer"
    MOVE = "move"
    COMPLETE = "complete"
    ABORT = "abort"


TRANSITIONS: dict[TransferState, dict[TransferEvent, TransferState]] = {
    TransferState.PLANNED: {
        TransferEvent.OFFER: TransferState.OFFERED,
        TransferEvent.ABORT: TransferState.ABORTED,
    },
    TransferState.OFFERED: {
        TransferEvent.MOVE: TransferState.MOVING,
        TransferEvent.ABORT: TransferState.ABORTED,
    },
    TransferState.MOVING: {
        TransferEvent.COMPLETE: TransferState.COMPLETE,
        TransferEvent.ABORT: TransferState.ABORTED,
    },
    TransferState.COMPLETE: {},
    TransferState.ABORTED: {},
}


class TransferProtocol:
    """One transfer's state.

    Args:
        transfer: Its number, for errors: that of its request.
    """

    def __init__(self, transfer: int) -> None:
        self.transfer = transfer
        self._state = TransferState.PLANNED

    def __repr__(self) -> str:
        return f"<TransferProtocol {self.transfer} {self._state.value}>"

    @property
    def state(self) -> TransferState:
        """Where the transfer is."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether nothing more can happen to it."""
        return not TRANSITIONS[self._state]

    def on(self, event: TransferEvent) -> TransferState:
        """Takes an event in, and returns the new state.

        Raises:
            WrongStateError: The event is impossible now. Nothing was changed.
        """
        following = TRANSITIONS[self._state].get(event)
        if following is None:
            raise WrongStateError(state=self._state.value, event=f"{event.value} of transfer {self.transfer}")
        self._state = following
        return following


class RequestLog:
    """Answers to requests that changed something, by client and request, so that a retry is answered and not repeated.

    Of each client the newest ``max_per_client`` are kept. A retry from before the oldest kept one cannot be told from a
    new request, and is refused instead of done twice.

    Args:
        max_per_client: Answers kept per client. 4096 is many times the requests that a client has under way, and only
            those can be retried.
    """

    def __init__(self, max_per_client: int = 4096) -> None:
        if max_per_client < 1:
            raise InvalidRequestError(argument="max_per_client", reason=f"{max_per_client} is not at least 1")
        self._max_per_client = max_per_client
        self._answers: dict[bytes, dict[int, bytes]] = {}
        self._oldest: dict[bytes, int] = {}  # requests below are forgotten

    @classmethod
    def restore(cls, entries: Iterable[tuple[bytes, int, bytes]], max_per_client: int = 4096) -> RequestLog:
        """A log with the entries that were written down, in any order."""
        log = cls(max_per_client)
        for client_id, request, answer in sorted(entries, key=lambda entry: entry[1]):
            log.record(client_id, request, answer)
        for client_id, answers in log._answers.items():
            if len(answers) == max_per_client:  # a full log has most likely forgotten some
                log._oldest[client_id] = max(log._oldest.get(client_id, 0), min(answers))
        return log

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def __repr__(self) -> str:
        return f"<RequestLog {len(self)} answers of {len(self._answers)} clients>"

    def seen(self, client_id: bytes, request: int) -> bytes | None:
        """The answer that this request got; ``None`` when it is new.

        Raises:
            RemoteProtocolError: The request is so old that its answer was forgotten. Nothing was done again.
        """
        answer = self._answers.get(client_id, {}).get(request)
        oldest = self._oldest.get(client_id, 0)
        if answer is None and request < oldest:
            raise RemoteProtocolError(expected=f"a request from {oldest} on", received=f"request {request}")
        return answer

    def record(self, client_id: bytes, request: int, answer: bytes) -> list[int]:
        """Remembers an answer.

        Returns:
            Requests of this client that were forgotten for it, to be erased where they are written down.

        Raises:
            WrongStateError: The request was answered before. Nothing was changed.
        """
        answers = self._answers.setdefault(client_id, {})
        if request in answers:
            raise WrongStateError(state="answered", event=f"second answer to request {request}")
        answers[request] = answer
        forgotten = []
        while len(answers) > self._max_per_client:
            oldest = next(iter(answers))
            del answers[oldest]
            self._oldest[client_id] = max(self._oldest.get(client_id, 0), oldest + 1)
            forgotten.append(oldest)
        return forgotten

    def forget_before(self, client_id: bytes, oldest: int) -> list[int]:
        """The client will not retry requests below ``oldest``: forgets them, and returns those it had kept."""
        answers = self._answers.get(client_id, {})
        forgotten = [request for request in answers if request < oldest]
        for request in forgotten:
            del answers[request]
        if oldest > 1:  # requests count from 1: most clients say nothing by this
            self._oldest[client_id] = max(self._oldest.get(client_id, 0), oldest)
        return forgotten

    def forget_client(self, client_id: bytes) -> list[int]:
        """The client is gone for good: forgets all of it, and returns the requests it had kept."""
        self._oldest.pop(client_id, None)
        return list(self._answers.pop(client_id, {}))

    def entries(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Client, request and answer of all that is kept."""
        for client_id, answers in self._answers.items():
            for request, answer in answers.items():
                yield client_id, request, answer
