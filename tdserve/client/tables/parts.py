"""A single extend that may share a request with others, and the shared request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.client.content.value_blocks import compute_joinable_nbytes
from tdserve.messages.long_lists import find_columns
from tdserve.structure.capture import Captured
from tdserve.v1 import control_pb2


class ExtendPart(NamedTuple):
    """One extend.

    Attributes:
        captured: Its rows.
        request: Annotations of the rows; the content is added when it is sent.
        deadline: Its own.
        what: Names it in the error of a timeout.
        future: Gets its row numbers.
        is_alone: Whether it must not share a request.
        values_nbytes: Size of the values.
        number: Number of its request, if it was tried before.
    """

    captured: Captured
    request: control_pb2.ExtendRequest
    deadline: Deadline
    what: str
    future: Future[torch.Tensor]
    is_alone: bool = False
    values_nbytes: int = 0
    number: int | None = None

    @classmethod
    def from_request(
        cls,
        captured: Captured,
        request: control_pb2.ExtendRequest,
        deadline: Deadline,
        *,
        number: int | None = None,
    ) -> ExtendPart:
        """Makes a part that is under way: its future cannot be cancelled."""
        what = f"an extend of {request.store!r} by {request.num_rows} rows"
        nbytes = compute_joinable_nbytes(captured.spec, captured.values)
        future: Future[torch.Tensor] = Future()
        future.set_running_or_notify_cancel()
        return cls(captured, request, deadline, what, future, nbytes is None, nbytes or 0, number)

    @property
    def nbytes(self) -> int:
        """Size of the tensors and values."""
        return self.captured.spec.nbytes + self.values_nbytes

    @property
    def is_plain(self) -> bool:
        """Whether its rows have no annotations."""
        said = self.request
        return not (said.keys or find_columns(said))

    def fits(self, other: ExtendPart) -> bool:
        """Returns whether both may share a request."""
        own, its = self.request, other.request
        return (
            not self.is_alone
            and not other.is_alone
            and own.writer == its.writer
            and own.keys == its.keys
            and own.HasField("priorities") == its.HasField("priorities")
            and own.HasField("policy_versions") == its.HasField("policy_versions")
            and self.captured.spec.with_rows(1) == other.captured.spec.with_rows(1)
        )


def join_requests(requests: Sequence[control_pb2.ExtendRequest]) -> control_pb2.ExtendRequest:
    """Merges the requests of parts that fit together."""
    if len(requests) == 1:
        return requests[0]
    first = requests[0]
    whole = control_pb2.ExtendRequest(
        store=first.store, num_rows=sum(request.num_rows for request in requests), writer=first.writer
    )
    whole.keys.extend(first.keys)
    if first.HasField("priorities"):
        whole.priorities.data = b"".join(_spread(each.priorities.data, each.num_rows, 8) for each in requests)
    if first.HasField("policy_versions"):
        whole.policy_versions.data = b"".join(_spread(each.policy_versions.data, each.num_rows, 8) for each in requests)
    if any(request.HasField("ends") for request in requests):
        whole.ends.data = b"".join(_spread(each.ends.data or b"\0", each.num_rows, 1) for each in requests)
    return whole


def _spread(content: bytes, num_rows: int, itemsize: int) -> bytes:
    """Returns one number per row; a single one is repeated for all."""
    return content if len(content) == num_rows * itemsize else np.tile(np.frombuffer(content, "V1"), num_rows).tobytes()
