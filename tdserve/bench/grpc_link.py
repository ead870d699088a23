"""The link of the gRPC floor: a second process, and a stream of bytes that is not looked at."""

from __future__ import annotations

from threading import Thread

from tdserve.bench.child import Child, Pipe
from tdserve.bench.floor_link import FIRST_NUM_OPS
from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.control.bare_stream import ACKNOWLEDGEMENT, MESSAGE_BYTES, BareStream, serve_bare_stream

GRPC_STREAM = "bare gRPC stream"
"""Name of the floor."""


class GrpcLink(Child):
    """The asking end and the other process. Threads: one caller."""

    def __init__(self) -> None:
        super().__init__(answer_streams)
        self._stream: BareStream | None = None

    def exchange(self, nbytes_out: int, nbytes_back: int, *, num_ops: int) -> Round:
        """Does operations and times each of them; see ``FloorLink.exchange``."""
        if self._stream is None:
            self._stream = BareStream(self.recv())
        stream = self._stream.begin(nbytes_out=nbytes_out, nbytes_back=nbytes_back, num_operations=num_ops)
        buffer = memoryview(bytearray(max(nbytes_out, nbytes_back, len(ACKNOWLEDGEMENT))))

        def operate() -> None:
            for at in range(0, nbytes_out, MESSAGE_BYTES):
                stream.write([buffer[at : min(at + MESSAGE_BYTES, nbytes_out)]])
            stream.read_into(buffer[:nbytes_back])

        try:
            return time_round(
                operate,
                Pacing(0.0, min_ops=num_ops, max_ops=num_ops),
                finish=lambda: stream.read_into(buffer[: len(ACKNOWLEDGEMENT)]),
            )
        finally:
            stream.close()

    def make_floor(self, *, out: int = 0, back: int = 0) -> Task:
        """Returns exchanges as a task; see ``FloorLink.make_floor``."""
        ops_per_s = 0.0

        def run_round(pacing: Pacing) -> Round:
            nonlocal ops_per_s
            num_ops = int(pacing.round_s * ops_per_s) if ops_per_s else FIRST_NUM_OPS
            done = self.exchange(out, back, num_ops=min(max(num_ops, pacing.min_ops), pacing.max_ops))
            ops_per_s = done.ops_per_s
            return done

        return Task(run_round)

    def close(self) -> None:
        """Ends the stream and the other process."""
        if self._stream is not None:
            self._stream.close()
        super().close()


def answer_streams(pipe: Pipe) -> None:
    """Is the other process; it ends when the pipe is closed."""
    Thread(target=serve_bare_stream, args=(pipe.send,), name="tdserve-bare-stream", daemon=True).start()
    pipe.recv()
