"""The process at the other end of the gloo floor: ``python -m tdserve.bench.floor_peer``. Ends with its input."""

from __future__ import annotations

import sys

from tdserve.base.errors import TransportError
from tdserve.bench.child import LinePipe
from tdserve.bench.floor_link import PURPOSE, REQUEST_NBYTES, Exchange
from tdserve.transport.gloo import WORKER_RANK, GlooChannel
from tdserve.transport.proving import Bond


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
