"""The log of answered requests, so that a retry changes nothing twice. The rule alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tdserve.base.errors import WrongStateError


class RequestLog:
    """Answers to requests that changed something, by client and request, so that a retry is answered and not repeated.

    An answer is kept until its client reports that it will not send the request again, or is gone for good. Neither the
    number of answers nor later requests evict one: only the client knows what it may still retry.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, dict[int, bytes]] = {}
        self._over: dict[bytes, tuple[int, Collection[int]]] = {}  # by client, its last report, see `forget`

    @classmethod
    def restore(cls, entries: Iterable[tuple[bytes, int, bytes]]) -> RequestLog:
        """Returns a log with entries from the disk, in any order."""
        log = cls()
        for client_id, request, answer in entries:
            log.record(client_id, request, answer)
        return log

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def __repr__(self) -> str:
        return f"<RequestLog {len(self)} answers of {len(self._answers)} clients>"

    def find_answer(self, client_id: bytes, request: int) -> bytes | None:
        """Returns the answer of this request; ``None`` if it has none."""
        return self._answers.get(client_id, {}).get(request)

    def is_over(self, client_id: bytes, request: int) -> bool:
        """Returns whether the client has reported that it will not repeat this request: another attempt has overtaken
        any that still arrives, and the answer is dropped."""
        below, but_for = self._over.get(client_id, (0, ()))
        return request < below and request not in but_for

    def count_kept(self, client_id: bytes) -> int:
        """Returns how many answers are kept for a client."""
        return len(self._answers.get(client_id, ()))

    def check_new(self, client_id: bytes, request: int) -> None:
        """Raises WrongStateError if the request was answered before."""
        if request in self._answers.get(client_id, ()):
            raise WrongStateError(state=f"request {request} is answered", event="a second answer")

    def record(self, client_id: bytes, request: int, answer: bytes, *, instead_of: int | None = None) -> None:
        """Keeps an answer, and drops that of ``instead_of``. Raises WrongStateError as ``check_new``; then nothing was
        changed."""
        self.check_new(client_id, request)
        answers = self._answers.setdefault(client_id, {})
        answers[request] = answer
        if instead_of is not None:
            answers.pop(instead_of, None)

    def forget(self, client_id: bytes, below: int, but_for: Collection[int] = ()) -> list[int]:
        """Drops answers to requests that the client will not repeat.

        Args:
            below: All requests with lower numbers,
            but_for: except these.

        Returns:
            The requests whose answers were kept, to be erased where they are written down.
        """
        if below >= self._over.get(client_id, (0, ()))[0]:  # reports may overtake one another
            self._over[client_id] = (below, but_for)
        answers = self._answers.get(client_id, {})
        forgotten = [request for request in answers if request < below and request not in but_for]
        for request in forgotten:
            del answers[request]
        return forgotten

    def forget_client(self, client_id: bytes) -> list[int]:
        """Drops everything of a client that is gone for good, and returns the requests whose answers were kept."""
        self._over.pop(client_id, None)
        return list(self._answers.pop(client_id, {}))

    def iter_entries(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yields client, request and answer of everything kept."""
        for client_id, answers in self._answers.items():
            for request, answer in answers.items():
                yield client_id, request, answer
