"""The replay handle: extend, sample, read by row number."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from tdserve.client.batches import Batches
from tdserve.client.calls import SessionClient, answer_timeout_s
from tdserve.client.description import StoreDescription
from tdserve.client.outgoing import Outgoing
from tdserve.client.reading import finish_read
from tdserve.client.sampling import Sampled, sampled
from tdserve.client.session import Session
from tdserve.client.writing import write, write_early
from tdserve.content import rows_layout
from tdserve.deadline import Deadline
from tdserve.errors import CapacityError, InvalidRequestError, SpecMismatchError
from tdserve.row_numbers import decode_rows
from tdserve.selection import encode, parse
from tdserve.spec.capture import Captured, capture
from tdserve.spec.tree import Spec, check_matches
from tdserve.v1 import control_pb2


class ReplayHandle:
    """A replay store: a ring of rows that writers extend and readers sample. Threads: safe.

    Attributes:
        name: Of the store.
        capacity: Rows; beyond it the oldest are overwritten.
        spec: Structure of one row.
    """

    def __init__(self, client: SessionClient, description: StoreDescription) -> None:
        self._client = client
        self.name = description.name
        self.capacity = description.capacity
        self.spec: Spec = description.spec
        self._stored = self.spec.prepend((self.capacity,))

    def __repr__(self) -> str:
        return f"<ReplayHandle {self.name!r} capacity={self.capacity} at {self._client.address}>"

    def __len__(self) -> int:
        """Live rows now."""
        return self._client.describe(self.name).num_rows

    def info(self) -> dict[str, Any]:
        """Figures of the table: num_rows, capacity, inserts, samples, reserved_rows, min_size, nbytes and more."""
        return self._client.describe(self.name).as_dict()

    def extend(self, batch: Any, *, timeout_s: float | None = None, return_early: bool = False) -> Any:
        """Writes rows; they become visible together.

        Args:
            batch: Tensordict of batch size ``[n, *row]``.
            timeout_s: Seconds to wait for room; None is the client's default.
            return_early: True returns a future at once; ``batch`` must not change before it is done. Up to 64 may be
                under way.

        Returns:
            Row numbers, int64 ``[n]``, or a future of them.

        Raises:
            SpecMismatchError: The batch does not fit the rows. Nothing was written.
            CapacityError: The batch has more rows than the ring. Nothing was written.
            DeadlineExceededError: Whether the rows were stored is unknown.
        """
        captured = self._captured(batch)
        num_rows = captured.spec.batch_size[0]
        deadline = self._client.deadline(timeout_s)
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64)
            return _done(empty) if return_early else empty

        def make_outgoing(session: Session) -> Outgoing:
            inline_bytes = session.inline_bytes
            return Outgoing(captured, fingerprint=self.spec.fingerprint, inline_bytes=inline_bytes, store=self.name)

        def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
            return {
                "extend": control_pb2.ExtendRequest(
                    store=self.name, num_rows=num_rows, content=outgoing.message, timeout_s=deadline.remaining_s
                )
            }

        what = f"an extend of {self.name!r} by {num_rows} rows"
        if return_early:
            done = write_early(self._client, make_outgoing, make_body, deadline=deadline, what=what)
            return _mapped(done)
        return _indices(write(self._client, make_outgoing, make_body, deadline=deadline, what=what))

    def sample(self, num_rows: int, *, device: Any = None, timeout_s: float | None = None) -> Any:
        """Draws rows uniformly, with replacement.

        Args:
            num_rows: At least 1.
            device: Where the result goes; None leaves it on the CPU.
            timeout_s: Seconds to wait until there are enough rows; None is the client's default, 0 asks once.

        Returns:
            Tensordict of batch size ``[num_rows, *row]`` with two more keys: ``"index"``, the row numbers, and
            ``"generation"``, which tells later whether a row was overwritten; both int64 ``[num_rows]``.

        Raises:
            DeadlineExceededError: There were not enough rows in time; says how many there are and are needed.
        """
        td = self._draw(check_count("num_rows", num_rows), 1, self._client.deadline(timeout_s)).build()
        return td if device is None else td.to(device)

    def batches(
        self, num_rows: int, *, prefetch: int = 4, device: Any = None, timeout_s: float | None = None
    ) -> Batches:
        """An endless iterator over samples, with some of them under way while the caller works.

        Args:
            num_rows: Rows of each batch.
            prefetch: Batches under way or waiting, at most; several of them share one message.
            device: Where batches go.
            timeout_s: Seconds that one batch may take; then the iterator raises DeadlineExceededError.
        """
        check_count("num_rows", num_rows)
        check_count("prefetch", prefetch)
        seconds = self._client.timeout_s if timeout_s is None else timeout_s
        return Batches(
            self._client, self.name, self._stored, num_rows, prefetch=prefetch, device=device, timeout_s=seconds
        )

    def __getitem__(self, index: Any) -> Any:
        """Live rows by their numbers, without counting them as sampled.

        An integer or an array of them means row numbers, as ``extend`` returned them and ``"index"`` shows them; a
        slice or a mask chooses among the live rows.

        Raises:
            SelectionError: A row is not live, or out of range.
        """
        deadline = self._client.deadline(None)
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, tuple):
            raise InvalidRequestError(argument="index", reason="a replay has one dimension of rows to choose from")
        num_rows = self._client.describe(self.name).capacity
        shape: tuple[int, ...] | None = None
        if not isinstance(index, slice):
            array = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
            if array.dtype != np.bool_:
                shape = array.shape
                encode(index, batch_size=(num_rows,), store=self.name)
        found = self._read(index, deadline)
        if shape is None or len(shape) == 1:
            return found
        return found[0] if shape == () else found.reshape(*shape)

    def _read(self, index: Any, deadline: Deadline) -> Any:
        selection = parse(index, store=self.name)

        def attempt(session: Session, request: int, deadline: Deadline) -> Any:
            asked = control_pb2.ReadRequest(
                store=self.name,
                selection=selection.to_message(),
                fingerprint=self.spec.fingerprint,
                timeout_s=deadline.remaining_s,
            )
            pending = session.send(request, read=asked)
            answer = pending.wait(answer_timeout_s(deadline), f"a read of {self.name!r}")
            accepted = answer.accepted if answer.HasField("accepted") else answer.done.accepted
            spec = self._stored.with_rows(accepted.num_rows)
            layout = rows_layout(self._stored, accepted.num_rows)
            content = finish_read(
                self._client,
                session,
                request,
                pending,
                answer=answer,
                spec=spec,
                layout=layout,
                deadline=deadline,
            )
            return content.build()

        return self._client.call(attempt, deadline)

    def _draw(self, num_rows: int, num_batches: int, deadline: Deadline) -> Sampled:
        return sampled(self._client, self.name, self._stored, num_rows, num_batches=num_batches, deadline=deadline)

    def _captured(self, batch: Any) -> Captured:
        captured = capture(batch, store=self.name)
        batch_size = captured.spec.batch_size
        if len(batch_size) != len(self.spec.batch_size) + 1:
            expected = f"batch size {['n', *self.spec.batch_size]}"
            raise SpecMismatchError(store=self.name, key="", expected=expected, actual=str(list(batch_size)))
        check_matches(self._stored.with_rows(batch_size[0]), captured.spec, store=self.name)
        if batch_size[0] > self.capacity:
            raise CapacityError(what=f"rows of one extend of {self.name!r}", asked=batch_size[0], free=self.capacity)
        return captured


def check_count(argument: str, value: Any) -> int:
    """Returns ``value`` if it is an integer of at least 1. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(argument=argument, reason=f"{value!r} is not an integer of at least 1")
    return value


def _indices(done: control_pb2.Done) -> torch.Tensor:
    return torch.from_numpy(decode_rows(done.indices).copy())


def _mapped(done: Future[control_pb2.Done]) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()

    def settle(finished: Future[control_pb2.Done]) -> None:
        error = finished.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(_indices(finished.result()))

    done.add_done_callback(settle)
    return future


def _done(result: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(result)
    return future
