"""A second client process that waits for new weights: ``python -m tdserve.bench.watcher ADDRESS WIRE``."""

from __future__ import annotations

import sys
from functools import lru_cache, partial

from tensordict import TensorDictBase

from tdserve.base.config import TransportName, check_transport
from tdserve.base.errors import CorruptDataError, LocalProtocolError, TDServeError
from tdserve.bench.child import Child, LinePipe, run_child
from tdserve.bench.content import check_equal, make_weights, stamp
from tdserve.client.client import connect

WATCH_TIMEOUT_S = 60.0


class Watcher(Child):
    """The process, seen from the benchmark. ``close`` leaves no process behind.

    Raises:
        PeerLostError: The process could not connect. It wrote its error to standard error.
    """

    def __init__(self, address: str, transport: TransportName) -> None:
        super().__init__("tdserve.bench.watcher", address, transport)
        try:
            self.receive()
        except TDServeError:
            self.close()
            raise

    def watch(self, name: str, newer_than: int | None) -> None:
        """Lets the process wait for a version; returns when it is about to ask for it."""
        self.ask({"watch": name, "newer_than": newer_than})

    def wait(self) -> int:
        """Waits until the other process has the whole version, and returns its number."""
        return int(self.receive()["version"])

    def check(self, num_tensors: int, nbytes: int, number: int) -> None:
        """Lets the process compare what it received with ``weights(num_tensors, nbytes)`` stamped with ``number``.

        Raises:
            CorruptDataError: They differ.
        """
        difference = self.ask({"check": [num_tensors, nbytes, number]})["difference"]
        if difference is not None:
            raise CorruptDataError(path="weights seen elsewhere", expected=f"number {number}", actual=difference)


def _follow(pipe: LinePipe, address: str, transport: TransportName) -> None:
    """Follows orders until the input ends.

    On one machine the process has a version as soon as it has mapped it. Over a wire it receives a version into the
    tensors of the one before.
    """
    is_mapped = transport == "shm"
    outs: dict[str, TensorDictBase] = {}
    with connect(address, transport=transport) as client:
        pipe.send({"ready": True})
        while (order := pipe.receive()) is not None:
            if "check" in order:
                (data,) = outs.values()
                pipe.send({"difference": _find_difference(data, *order["check"])})
                continue
            name, newer_than = order["watch"], order["newer_than"]
            out = None if is_mapped else outs.get(name)
            pipe.send({"waiting": True})
            found = client.latest(name, newer_than=newer_than, timeout_s=WATCH_TIMEOUT_S, out=out, copy=not is_mapped)
            if found is None:
                raise LocalProtocolError(reason="latest() gave up before its timeout")
            pipe.send({"version": found.version})
            outs = {name: found.data}


def _find_difference(found: TensorDictBase, num_tensors: int, nbytes: int, number: int) -> str | None:
    expected = _make_weights(num_tensors, nbytes)
    stamp(expected, number)
    try:
        check_equal(found, expected, what="weights")
    except CorruptDataError as error:
        return str(error)
    return None


_make_weights = lru_cache(maxsize=1)(make_weights)


if __name__ == "__main__":
    address, wire = sys.argv[1:]
    sys.exit(run_child(partial(_follow, address=address, transport=check_transport(wire))))
