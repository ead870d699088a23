"""The gloo floor's link: a second process, a raw two-rank group with it, and messages from reused buffers.

``python -m tdserve.bench.floor_link`` is the second process, which ends with its input.
"""

from __future__ import annotations

import sys
import time

import torch

from tdserve.base.errors import TransportError, WrongStateError
from tdserve.base.ids import new_secret
from tdserve.bench.child import Child, LinePipe
from tdserve.bench.measure import Round
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.proving import Bond

HOST = "127.0.0.1"
"""Loopback, as the benchmark's server."""

WAIT_S = 60.0
"""A floor operation lasts milliseconds: whoever waits this long waits for a process that is stuck."""

REQUEST_NBYTES = 64
"""What stands for a request, or for an acknowledgement, beside the payload: a small message."""

WHOLE = 1 << 40
"""A largest message that no payload reaches: everything in one."""

TAG = 1

PURPOSE = "the floor"
"""Of the link, in what its ends prove to each other."""


class Exchange:
    """One end of the floor's only primitive: messages of agreed sizes from and into one reused buffer.

    An operation is ``nbytes_out`` bytes from the asking end, if any, then ``nbytes_in`` bytes back, if any. With
    both, the ends wait for each other; with one of them 0 it is a stream. Payloads are cut into messages of
    ``message_nbytes``.
    """

    def __init__(self, channel: GlooChannel) -> None:
        self._channel = channel
        self._buffer = torch.ones(REQUEST_NBYTES, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Makes the buffer large enough and touches its pages; a smaller payload uses the start of it."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.ones(nbytes, dtype=torch.uint8)

    def send(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Sends ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self._channel.send(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)

    def receive(self, nbytes: int, message_nbytes: int = WHOLE) -> None:
        """Receives ``nbytes`` bytes."""
        for start in range(0, nbytes, message_nbytes):
            self._channel.recv(self._buffer[start : min(start + message_nbytes, nbytes)], TAG).wait(WAIT_S)


class FloorLink:
    """The asking end. ``connect`` comes first, ``close`` leaves no process behind. Threads: one caller."""

    def __init__(self) -> None:
        self._child = Child("tdserve.bench.floor_link")
        self._channel: GlooChannel | None = None

    @property
    def pid(self) -> int:
        """Of the other process."""
        return self._child.pid

    def connect(self) -> None:
        """Forms the group; the other process may still be starting."""
        self._child.hear()
        bond = Bond(new_secret(), PURPOSE)
        self._child.tell({"connect": HOST, "secret": bond.secret.hex()})
        kv_store = self._child.pipe.kv_store
        self._channel = GlooChannel(kv_store, CLIENT_RANK, host=HOST, bond=bond, peer="the floor's peer")
        self._exchange = Exchange(self._channel)

    def exchange(self, nbytes_out: int, nbytes_in: int, *, num_ops: int, message_nbytes: int = WHOLE) -> Round:
        """Does operations and times each.

        Args:
            nbytes_out: Bytes that this process sends in each operation; 0 for none.
            nbytes_in: Bytes that it then receives; 0 for none.
            num_ops: Operations.
            message_nbytes: Largest single message.

        Raises:
            WrongStateError: Not connected.
            PeerLostError: The other process ended.
        """
        if self._channel is None:
            raise WrongStateError(state="not connected", event="an exchange")
        exchange = self._exchange
        exchange.reserve(max(nbytes_out, nbytes_in))
        order = {"out": nbytes_out, "in": nbytes_in, "num_ops": num_ops, "message_nbytes": message_nbytes}
        self._child.tell(order)
        self._child.hear()
        op_s = []
        begun = time.perf_counter()
        for _ in range(num_ops):
            started = time.perf_counter()
            exchange.send(nbytes_out, message_nbytes)
            exchange.receive(nbytes_in, message_nbytes)
            op_s.append(time.perf_counter() - started)
        exchange.receive(REQUEST_NBYTES)  # by then the peer has everything
        return Round(tuple(op_s), time.perf_counter() - begun)

    def close(self) -> None:
        """Ends the other process."""
        if self._channel is not None:
            self._channel.close()
        self._child.close()


def main() -> int:
    """Answers orders until the input ends; returns the exit status."""
    pipe = LinePipe(sys.stdin, sys.stdout)
    pipe.send({"ready": True})
    order = pipe.receive()
    if order is None:
        return 0
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
    except TransportError:
        return 1  # the benchmark ended in the middle of a round
    finally:
        channel.close()
        pipe.join()  # its thread must not hold standard input while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
