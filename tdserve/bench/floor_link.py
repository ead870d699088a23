"""The link of the gloo floor: a second process, a raw group of two ranks, and messages from reused buffers."""

from __future__ import annotations

import torch

from tdserve.base.ids import make_secret
from tdserve.bench.child import Child, Pipe
from tdserve.bench.measure import Pacing, Round, Task, time_round
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.proving import ChannelCredential
from tdserve.transport.rendezvous import KVStore

HOST = "127.0.0.1"
"""Loopback, as for the benchmark's server."""

WAIT_S = 60.0
"""An operation takes milliseconds. After this long, the other process is stuck."""

REQUEST_NBYTES = 64
"""The size of a small message: it stands for a request or for an acknowledgement."""

WHOLE = 1 << 40
"""The largest message where a payload is not cut: no payload is larger."""

TAG = 1

FIRST_NUM_OPS = 4
"""The first round of a floor only finds out how long one operation takes."""


class FloorLink(Child):
    """The asking end and the other process, which imports torch meanwhile. Threads: one caller."""

    def __init__(self) -> None:
        super().__init__(answer_exchanges)
        self._exchange: Exchange | None = None

    def exchange(self, nbytes_out: int, nbytes_in: int, *, num_ops: int, message_nbytes: int = WHOLE) -> Round:
        """Does operations and times each of them.

        Args:
            nbytes_out: Bytes that this process sends in each operation; 0 for none.
            nbytes_in: Bytes that it then receives; 0 for none.
            num_ops: Number of operations.
            message_nbytes: Size of the largest message.

        Raises:
            PeerLostError: The other process ended.
        """
        if self._exchange is None:
            secret = make_secret()
            self.ask(secret)
            self._exchange = Exchange(self, CLIENT_RANK, secret)
        exchange = self._exchange
        exchange.reserve(max(nbytes_out, nbytes_in))
        self.ask((nbytes_out, nbytes_in, num_ops, message_nbytes))

        def operate() -> None:
            exchange.send(nbytes_out, message_nbytes)
            exchange.recv(nbytes_in, message_nbytes)

        def finish() -> None:
            exchange.recv(REQUEST_NBYTES)  # by then the peer has received everything

        return time_round(operate, Pacing(0.0, min_ops=num_ops, max_ops=num_ops), finish=finish)

    def make_floor(self, *, out: int = 0, back: int = 0, message_nbytes: int = WHOLE) -> Task:
        """Returns exchanges as a task.

        Both ends agree on their number before a round, so each round is as long as the speed of the last one makes it.

        Args:
            out: Bytes to the other process in each operation.
            back: Bytes back from it. Where ``out`` or ``back`` is 0, the operations are a stream.
            message_nbytes: Size of the largest message.
        """
        ops_per_s = 0.0

        def run_round(pacing: Pacing) -> Round:
            nonlocal ops_per_s
            num_ops = int(pacing.round_s * ops_per_s) if ops_per_s else FIRST_NUM_OPS
            num_ops = min(max(num_ops, pacing.min_ops), pacing.max_ops)
            done = self.exchange(out, back, num_ops=num_ops, message_nbytes=message_nbytes)
            ops_per_s = done.ops_per_s
            return done

        return Task(run_round)

    def close(self) -> None:
        """Closes the channel and ends the other process."""
        if self._exchange is not None:
            self._exchange.channel.close()
        super().close()


class Exchange:
    """One end of the floor's only primitive: messages of agreed sizes, from and into one reused buffer.

    An operation moves ``nbytes_out`` bytes away from the asking end and then ``nbytes_in`` bytes back. With both, the
    ends wait for each other; when one of them is 0, the operations are a stream. Payloads are cut into messages of
    ``message_nbytes``.

    Args:
        pipe: To the other end.
        rank: Rank of this end.
        secret: Both ends prove that they know it.
    """

    def __init__(self, pipe: Pipe, rank: int, secret: bytes) -> None:
        credential = ChannelCredential(secret, "the floor")
        self.channel = GlooChannel(
            _PipeStore(pipe), rank, host=HOST, credential=credential, peer="the other end of the floor"
        )
        self._buffer = torch.ones(REQUEST_NBYTES, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Makes the buffer large enough and touches its pages. A smaller payload uses the start of it."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.ones(nbytes, dtype=torch.uint8)

    def send(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Sends ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self.channel.send(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)

    def recv(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Receives ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self.channel.recv(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)


class _PipeStore(KVStore):
    """The rendezvous of the two ends, over their pipe: while a channel forms, nothing else travels there."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(lambda key, value: pipe.send((key, value)))
        self._pipe = pipe

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """See KVStore."""
        while key not in self._entries:
            self.feed(*self._pipe.recv())
        return super().get_within(key, timeout_s)


def answer_exchanges(pipe: Pipe) -> None:
    """Is the other process."""
    secret = pipe.recv()
    pipe.send(None)
    exchange = Exchange(pipe, WORKER_RANK, secret)
    try:
        while True:
            nbytes_out, nbytes_in, num_ops, message_nbytes = pipe.recv()
            exchange.reserve(max(nbytes_out, nbytes_in))
            pipe.send(None)
            for _ in range(num_ops):
                exchange.recv(nbytes_out, message_nbytes)
                exchange.send(nbytes_in, message_nbytes)
            exchange.send(REQUEST_NBYTES)
    finally:
        exchange.channel.close()
