"""The memory of requests that were answered, so that a retry changes nothing twice. The rule alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tdserve.base.errors import WrongStateError


class RequestLog:
    """Answers to requests that changed something, by client and request, so that a retry is answered and not repeated.

    An answer is kept until its client says that it will not send the request again, or is gone for good. Nothing is
    forgotten because there are many, or because others came later: only the client knows what it may still retry.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, dict[int, bytes]] = {}
        self._over: dict[bytes, tuple[int, Collection[int]]] = {}  # by client, what it has said last, see `forget`

    @classmethod
    def restore(cls, entries: Iterable[tuple[bytes, int, bytes]]) -> RequestLog:
        """A log with the entries that were written down, in any order."""
        log = cls()
        for client_id, request, answer in entries:
            log.record(client_id, request, answer)
        return log

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def __repr__(self) -> str:
        return f"<RequestLog {len(self)} answers of {len(self._answers)} clients>"

    def seen(self, client_id: bytes, request: int) -> bytes | None:
        """The answer that this request got; ``None`` when it has none."""
        return self._answers.get(client_id, {}).get(request)

    def is_over(self, client_id: bytes, request: int) -> bool:
        """Whether the client has said that it will not ask for this any more: what still comes is an attempt that was
        overtaken by another, whose answer is forgotten."""
        below, but_for = self._over.get(client_id, (0, ()))
        return request < below and request not in but_for

    def num_kept(self, client_id: bytes) -> int:
        """How many answers are kept for a client."""
        return len(self._answers.get(client_id, ()))

    def check_new(self, client_id: bytes, request: int) -> None:
        """Raises WrongStateError when the request was answered before."""
        if request in self._answers.get(client_id, ()):
            raise WrongStateError(state="answered", event=f"second answer to request {request}")

    def record(self, client_id: bytes, request: int, answer: bytes, *, instead_of: int | None = None) -> None:
        """Remembers an answer, and forgets that of ``instead_of``. Raises WrongStateError as ``check_new``; nothing was
        changed then."""
        self.check_new(client_id, request)
        answers = self._answers.setdefault(client_id, {})
        answers[request] = answer
        if instead_of is not None:
            answers.pop(instead_of, None)

    def forget(self, client_id: bytes, below: int, but_for: Collection[int] = ()) -> list[int]:
        """Forgets what the client will not send again.

        Args:
            below: All requests with lower numbers,
            but_for: except these.

        Returns:
            The requests whose answers were kept, to be erased where they are written down.
        """
        if below >= self._over.get(client_id, (0, ()))[0]:  # they may overtake one another
            self._over[client_id] = (below, but_for)
        answers = self._answers.get(client_id, {})
        forgotten = [request for request in answers if request < below and request not in but_for]
        for request in forgotten:
            del answers[request]
        return forgotten

    def forget_client(self, client_id: bytes) -> list[int]:
        """The client is gone for good: forgets all of it, and returns the requests whose answers were kept."""
        self._over.pop(client_id, None)
        return list(self._answers.pop(client_id, {}))

    def entries(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Client, request and answer of all that is kept."""
        for client_id, answers in self._answers.items():
            for request, answer in answers.items():
                yield client_id, request, answer
