"""A table in this process that tests can stop, and that records its calls."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.writers.nstep import NStep
from tdserve.client.tables.writers.row_buffer import NO_PRIORITY
from tdserve.client.tables.writers.row_sender import RowSender
from tdserve.rules.replay.settings import Settings
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import Captured, capture

WAIT_S = 20.0


def row(number: int, **more: Any) -> TensorDict:
    """Returns a row that contains its number."""
    return TensorDict({"x": torch.tensor(number), **more})


class RecordingTable:
    """The part of ReplayHandle that a writer needs.

    Attributes:
        batches: Numbers of the rows in every stored batch.
        calls: The other arguments of each call.
        faults: Errors for the next calls, one each; None raises nothing.
        info_fault: Error that ``info`` raises.
        num_asked: Number of calls of ``info``.
    """

    name = "frames"

    def __init__(self, like: Any = None, *, capacity: int = 10_000, settings: Settings | None = None) -> None:
        self.spec = capture(row(0) if like is None else like).spec
        self.capacity = capacity
        self.settings = settings or Settings()
        self.batches: list[list[int]] = []
        self.contents: list[TensorDictBase] = []
        self.calls: list[dict[str, Any]] = []
        self.faults: list[BaseException | None] = []
        self.info_fault: BaseException | None = None
        self.num_asked = 0
        self._permits = 1 << 30
        self._num_waiting = 0
        self._changed = Condition()

    def hold(self) -> None:
        """Makes every call wait from now on."""
        with self._changed:
            self._permits = 0

    def let(self, num_calls: int = 1 << 30) -> None:
        """Lets this many calls through."""
        with self._changed:
            self._permits += num_calls
            self._changed.notify_all()

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> Any:
        """Records the rows when it may go on."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits > 0)
            self._permits -= 1
            self._num_waiting -= 1
            fault = self.faults.pop(0) if self.faults else None
            if fault is not None:
                raise fault
            batch: Any = torch.cat([build(each.spec, each.tensors, each.values) for each in captured])
            self.contents.append(batch)
            self.batches.append(batch["x"].tolist())
            self.calls.append({**annotations._asdict(), "timeout_s": timeout_s})
            self._changed.notify_all()
            return torch.arange(len(batch))

    def info(self) -> dict[str, Any]:
        """Returns figures or raises the fault."""
        with self._changed:
            self.num_asked += 1
            self._changed.notify_all()
        if self.info_fault is not None:
            raise self.info_fault
        return {}

    @property
    def numbers(self) -> list[int]:
        """Returns the numbers of all rows, in order."""
        return [number for batch in self.batches for number in batch]

    @property
    def ends(self) -> list[int]:
        """Returns the numbers of the rows that end their trajectory."""
        marked = [call["ends"] for call in self.calls]
        return [
            number
            for batch, ends in zip(self.batches, marked, strict=True)
            for number, is_end in zip(batch, np.zeros(len(batch), bool) if ends is None else ends, strict=True)
            if is_end
        ]

    def wait_stored(self, num_rows: int) -> None:
        """Waits until this many rows are stored."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.numbers) >= num_rows, WAIT_S)

    def wait_asked(self, num_times: int) -> None:
        """Waits until ``info`` was called this often."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_asked >= num_times, WAIT_S)

    def wait_called(self) -> None:
        """Waits until a batch is being sent."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_waiting > 0, WAIT_S)


class TimedTable(RecordingTable):
    """A recording table with all that a writer looks up."""

    allow_pickle = False

    def __init__(self, timeout_s: float = WAIT_S) -> None:
        super().__init__()
        self._client = self
        self.senders: set[object] = set()
        self.timeout_s = timeout_s


def sender(
    table: RecordingTable,
    *,
    batch: int = 4,
    flush_s: float | None = None,
    max_bytes: int = 1 << 20,
    n_step: NStep | None = None,
) -> RowSender:
    """Makes a sender of rows of one number."""
    window = None if n_step is None else n_step.make_window(table.spec)
    return RowSender(table, table.spec, batch=batch, flush_s=flush_s, max_bytes=max_bytes, window=window)


def put(subject: RowSender, *numbers: int, priority: float = NO_PRIORITY, timeout_s: float | None = WAIT_S) -> None:
    """Rows of these numbers."""
    for number in numbers:
        subject.put([torch.tensor(number)], [], 0, priority, timeout_s)
