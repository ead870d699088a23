"""A single extend that may share a request with others, and the shared request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.client.content.value_blocks import compute_joinable_nbytes
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.messages.long_lists import find_columns
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class ExtendPart(NamedTuple):
    """One extend.

    Attributes:
        captured: Its rows, in order; several captures of one structure.
        request: Annotations of the rows; the content is added when it is sent.
        deadline: Its own.
        what: Names it in the error of a timeout.
        future: Gets its row numbers.
        is_alone: Whether it must not share a request.
        values_nbytes: Size of the values.
        number: Number of its request, if it was tried before.
    """

    captured: Sequence[Captured]
    request: control_pb2.ExtendRequest
    deadline: Deadline
    what: str
    future: AwaitableFuture[torch.Tensor]
    is_alone: bool = False
    values_nbytes: int = 0
    number: int | None = None

    @classmethod
    def from_request(
        cls,
        captured: Sequence[Captured],
        request: control_pb2.ExtendRequest,
        deadline: Deadline,
        *,
        number: int | None = None,
    ) -> ExtendPart:
        """Makes a part that is under way: its future cannot be cancelled."""
        what = f"an extend of {request.store!r} by {request.num_rows} rows"
        sizes = [compute_joinable_nbytes(each.spec, each.values) for each in captured]
        values_nbytes = sum(size or 0 for size in sizes)
        future: AwaitableFuture[torch.Tensor] = AwaitableFuture.make_running()
        return cls(captured, request, deadline, what, future, None in sizes, values_nbytes, number)

    @property
    def nbytes(self) -> int:
        """Size of the tensors and values."""
        return sum(each.spec.nbytes for each in self.captured) + self.values_nbytes

    @property
    def row_spec(self) -> Spec:
        """Structure of one row, with a batch dimension of 1."""
        return self.captured[0].spec.with_rows(1)

    @property
    def is_plain(self) -> bool:
        """Whether its rows have no annotations."""
        return not (self.request.keys or find_columns(self.request))

    def is_compatible_with(self, other: ExtendPart) -> bool:
        """Returns whether both may share a request, which has the deadline that comes first."""
        own, its = self.request, other.request
        return (
            not self.is_alone
            and not other.is_alone
            and own.writer == its.writer
            and own.keys == its.keys
            and own.HasField("priorities") == its.HasField("priorities")
            and own.HasField("policy_versions") == its.HasField("policy_versions")
            and self.row_spec == other.row_spec
            and self.deadline.is_near(other.deadline)
        )


class WaitingParts:
    """Parts that wait to be sent, in order. Threads: not safe; the caller needs a lock.

    Args:
        max_rows: Most rows of a shared request; 1 shares nothing.

    Attributes:
        nbytes: Size of all of them.
    """

    def __init__(self, max_rows: int) -> None:
        self.nbytes = 0
        self._max_rows = max_rows
        self._parts: deque[ExtendPart] = deque()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[ExtendPart]:
        return iter(self._parts)

    @property
    def first(self) -> ExtendPart:
        """The part that is sent next; there must be one."""
        return self._parts[0]

    def append(self, part: ExtendPart) -> None:
        """Adds a part behind all others."""
        self._parts.append(part)
        self.nbytes += part.nbytes

    def put_back(self, parts: Sequence[ExtendPart]) -> None:
        """Adds parts before all others, in their order."""
        self._parts.extendleft(reversed(parts))
        self.nbytes += sum(part.nbytes for part in parts)

    def is_enough(self, under_way_nbytes: int, max_bytes: int) -> bool:
        """Returns whether about as much waits as is under way already, so that requests grow with the caller's window.

        Batches of values, or of tensors that differ in size, are rarely as large as those before them.
        """
        return self._max_rows == 1 or self.nbytes >= 3 * min(under_way_nbytes, max_bytes) // 4

    def take(self, max_bytes: int) -> list[ExtendPart]:
        """Removes and returns the parts of the next request: the first, and those behind it that may share it."""
        first = self._parts.popleft()
        parts, nbytes, num_rows = [first], first.nbytes, first.request.num_rows
        while self._parts:
            following = self._parts[0]
            nbytes += following.nbytes
            num_rows += following.request.num_rows
            if nbytes > max_bytes or num_rows > self._max_rows or not first.is_compatible_with(following):
                break
            parts.append(self._parts.popleft())
        self.nbytes -= sum(part.nbytes for part in parts)
        return parts

    def take_out(self, is_meant: Callable[[ExtendPart], bool]) -> list[ExtendPart]:
        """Removes and returns the parts that are meant."""
        are_meant = [is_meant(part) for part in self._parts]
        taken = list(compress(self._parts, are_meant))
        self._parts = deque(part for part, is_taken in zip(self._parts, are_meant, strict=True) if not is_taken)
        self.nbytes -= sum(part.nbytes for part in taken)
        return taken


def join_requests(requests: Sequence[control_pb2.ExtendRequest]) -> control_pb2.ExtendRequest:
    """Merges the requests of parts that fit together."""
    if len(requests) == 1:
        return requests[0]
    first = requests[0]
    whole = control_pb2.ExtendRequest(
        store=first.store,
        num_rows=sum(request.num_rows for request in requests),
        writer=first.writer,
        kind=first.kind,
    )
    whole.keys.extend(first.keys)
    if requests[-1].HasField("policy_news"):
        whole.policy_news.CopyFrom(requests[-1].policy_news)
    if first.HasField("priorities"):
        whole.priorities.data = b"".join(_repeat_number(each.priorities.data, each.num_rows, 8) for each in requests)
    if first.HasField("policy_versions"):
        whole.policy_versions.data = b"".join(
            _repeat_number(each.policy_versions.data, each.num_rows, 8) for each in requests
        )
    if any(request.HasField("ends") for request in requests):
        whole.ends.data = b"".join(_repeat_number(each.ends.data or b"\0", each.num_rows, 1) for each in requests)
    return whole


def _repeat_number(content: bytes, num_rows: int, itemsize: int) -> bytes:
    """Returns one number per row; a single one is repeated for all."""
    return content if len(content) == num_rows * itemsize else np.tile(np.frombuffer(content, "V1"), num_rows).tobytes()
