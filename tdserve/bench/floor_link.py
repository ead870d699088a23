"""The link of the gloo floor: a second process, a raw group of two ranks, and messages from reused buffers.

``python -m tdserve.bench.floor_link`` is the second process. It ends when its input ends.
"""

from __future__ import annotations

import sys
import time

import torch

from tdserve.base.errors import TransportError, WrongStateError
from tdserve.base.ids import make_secret
from tdserve.bench.child import Child, LinePipe, run_child
from tdserve.bench.measure import Round
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.proving import Bond

HOST = "127.0.0.1"
"""Loopback, as for the benchmark's server."""

WAIT_S = 60.0
"""An operation takes milliseconds. After this long, the other process is stuck."""

REQUEST_NBYTES = 64
"""The size of a small message: it stands for a request or for an acknowledgement."""

WHOLE = 1 << 40
"""The largest message where a payload is not cut: no payload is larger."""

TAG = 1

PURPOSE = "the floor"
"""What both ends prove the link to be for."""


class Exchange:
    """One end of the floor's only primitive: messages of agreed sizes, from and into one reused buffer.

    An operation moves ``nbytes_out`` bytes away from the asking end and then ``nbytes_in`` bytes back. With both, the
    ends wait for each other; when one of them is 0, the operations are a stream. Payloads are cut into messages of
    ``message_nbytes``.
    """

    def __init__(self, channel: GlooChannel) -> None:
        self.channel = channel
        self._buffer = torch.ones(REQUEST_NBYTES, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Makes the buffer large enough and touches its pages. A smaller payload uses the start of it."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.ones(nbytes, dtype=torch.uint8)

    def send(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Sends ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self.channel.send(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)

    def receive(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Receives ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self.channel.recv(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)


class FloorLink(Child):
    """The asking end and the other process. ``connect`` comes first. Threads: one caller."""

    def __init__(self) -> None:
        super().__init__("tdserve.bench.floor_link")
        self._exchange: Exchange | None = None

    def connect(self) -> None:
        """Forms the group; the other process may still be starting."""
        self.receive()
        bond = Bond(make_secret(), PURPOSE)
        self.send({"connect": HOST, "secret": bond.secret.hex()})
        kv_store = self.pipe.kv_store
        self._exchange = Exchange(GlooChannel(kv_store, CLIENT_RANK, host=HOST, bond=bond, peer="the floor's peer"))

    def exchange(self, nbytes_out: int, nbytes_in: int, *, num_ops: int, message_nbytes: int = WHOLE) -> Round:
        """Does operations and times each of them.

        Args:
            nbytes_out: Bytes that this process sends in each operation; 0 for none.
            nbytes_in: Bytes that it then receives; 0 for none.
            num_ops: Number of operations.
            message_nbytes: Size of the largest message.

        Raises:
            WrongStateError: The link is not connected.
            PeerLostError: The other process ended.
        """
        exchange = self._exchange
        if exchange is None:
            raise WrongStateError(state="not connected", event="an exchange")
        exchange.reserve(max(nbytes_out, nbytes_in))
        self.ask({"out": nbytes_out, "in": nbytes_in, "num_ops": num_ops, "message_nbytes": message_nbytes})
        op_s = []
        begun = time.perf_counter()
        for _ in range(num_ops):
            started = time.perf_counter()
            exchange.send(nbytes_out, message_nbytes)
            exchange.receive(nbytes_in, message_nbytes)
            op_s.append(time.perf_counter() - started)
        exchange.receive(REQUEST_NBYTES)  # by then the peer has received everything
        return Round(tuple(op_s), time.perf_counter() - begun)

    def close(self) -> None:
        """Closes the channel and ends the other process."""
        if self._exchange is not None:
            self._exchange.channel.close()
        super().close()


def _answer(pipe: LinePipe) -> None:
    pipe.send({"ready": True})
    order = pipe.receive()
    if order is None:
        return
    bond = Bond(bytes.fromhex(order["secret"]), PURPOSE)
    channel = GlooChannel(pipe.kv_store, WORKER_RANK, host=order["connect"], bond=bond, peer="the benchmark")
    exchange = Exchange(channel)
    try:
        while (order := pipe.receive()) is not None:
            exchange.reserve(max(order["out"], order["in"]))
            pipe.send({"ready": True})
            for _ in range(order["num_ops"]):
                exchange.receive(order["out"], order["message_nbytes"])
                exchange.send(order["in"], order["message_nbytes"])
            exchange.send(REQUEST_NBYTES)
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(run_child(_answer, ends=(TransportError,)))
