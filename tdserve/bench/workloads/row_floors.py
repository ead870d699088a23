"""What writing and sampling rows is measured against: over the wire raw gloo, on one machine memory itself."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase

from tdserve.bench.content import row_nbytes, total_nbytes
from tdserve.bench.floors import MEMCPY, MappedRows, memcpy_ring
from tdserve.bench.measure import Task
from tdserve.bench.stage import Stage
from tdserve.bench.torchrl_buffer import TorchRLBuffer
from tdserve.bench.workloads.replay_rounds import Batches, Check, pipelined_samples, single_samples
from tdserve.client.tables.replay import ReplayHandle

LOCAL_WRITE = "local memmap"
LOCAL_GATHER = "local gather, fresh"
"""``index_select`` leaf by leaf into new tensors, with one thread: what a sample has to do at least."""
LOCAL_GATHER_TOUCHED = "local gather, reused"
LOCAL_INDEXING = "local rows[index]"
TORCHRL = "TorchRL in process"
OVER_GLOO = "tdserve over gloo"


@dataclass(frozen=True)
class GlooRowFloors:
    """Raw gloo, and for comparison what one process reaches on mapped rows of its own."""

    stage: Stage
    pool: TensorDictBase
    mapped: MappedRows

    def store(self, num_rows: int, batches: Batches) -> dict[str, Task]:
        """The payload, then an acknowledgement."""
        return {"gloo, acknowledged": self.stage.gloo.store(self._nbytes(num_rows)), **self._local_write(batches)}

    def stream_out(self, num_rows: int, batches: Batches) -> dict[str, Task]:
        """One payload after the other."""
        return {"gloo stream": self.stage.gloo.stream_out(self._nbytes(num_rows)), **self._local_write(batches)}

    def fetch(self, num_rows: int) -> dict[str, Task]:
        """A request, then the payload."""
        return {"gloo, asked for": self.stage.gloo.fetch(self._nbytes(num_rows)), **self._local_read(num_rows)}

    def stream_in(self, num_rows: int) -> dict[str, Task]:
        """One payload after the other."""
        return {"gloo stream": self.stage.gloo.stream_in(self._nbytes(num_rows)), **self._local_read(num_rows)}

    def _nbytes(self, num_rows: int) -> int:
        return row_nbytes(self.pool) * num_rows

    def _local_write(self, batches: Batches) -> dict[str, Task]:
        return {LOCAL_WRITE: self.mapped.write(batches, self.stage.pacing)}

    def _local_read(self, num_rows: int) -> dict[str, Task]:
        return {"local memmap": self.mapped.gather(num_rows, self.stage.pacing)}


@dataclass(frozen=True)
class ShmRowFloors:
    """Memory: memcpy and gathers of mapped rows in this process, TorchRL's own buffer, and tdserve over gloo.

    Attributes:
        torchrl: ``None`` where it is not installed, or not compared with.
        gloo_replay: The same store, reached by a second client.
        capacity: Rows of the store.
        check: Of what is sampled over gloo.
    """

    stage: Stage
    pool: TensorDictBase
    mapped: MappedRows
    torchrl: TorchRLBuffer | None
    gloo_replay: ReplayHandle
    capacity: int
    check: Check

    def store(self, num_rows: int, batches: Batches) -> dict[str, Task]:
        """A copy of as many bytes into pages that exist, and a write to mapped rows."""
        row = row_nbytes(self.pool)
        memcpy = memcpy_ring(
            row * num_rows,
            source_nbytes=total_nbytes(self.pool),
            ring_nbytes=row * self.capacity,
            pacing=self.stage.pacing,
        )
        return {MEMCPY: memcpy, LOCAL_WRITE: self.mapped.write(batches, self.stage.pacing)}

    def stream_out(self, num_rows: int, batches: Batches) -> dict[str, Task]:
        """The same: memory acknowledges nothing."""
        return self.store(num_rows, batches)

    def fetch(self, num_rows: int) -> dict[str, Task]:
        """Gathers in this process, and single samples over gloo."""
        over_gloo = single_samples(self.gloo_replay, num_rows, self.stage.pacing, self.check)
        return {**self._local_read(num_rows), OVER_GLOO: over_gloo}

    def stream_in(self, num_rows: int) -> dict[str, Task]:
        """Gathers in this process, and samples that are asked for ahead over gloo."""
        over_gloo = pipelined_samples(self.gloo_replay, num_rows, self.stage.pacing, self.check)
        return {**self._local_read(num_rows), OVER_GLOO: over_gloo}

    def _local_read(self, num_rows: int) -> dict[str, Task]:
        pacing = self.stage.pacing
        torchrl = {} if self.torchrl is None else {TORCHRL: self.torchrl.sample(num_rows, pacing)}
        return {
            LOCAL_GATHER: self.mapped.select(num_rows, pacing),
            LOCAL_GATHER_TOUCHED: self.mapped.select_into(num_rows, pacing),
            LOCAL_INDEXING: self.mapped.gather(num_rows, pacing),
            **torchrl,
        }


RowFloors = GlooRowFloors | ShmRowFloors
"""The floors of the four ways to move rows; the first is the one that a target means which names none."""
