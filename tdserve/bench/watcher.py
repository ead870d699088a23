"""A second client process that waits for new weights: ``python -m tdserve.bench.watcher ADDRESS WIRE``."""

from __future__ import annotations

import sys
from functools import lru_cache

from tensordict import TensorDict, TensorDictBase

from tdserve.base.config import TransportName, check_transport
from tdserve.base.errors import CorruptDataError, LocalProtocolError, TDServeError
from tdserve.bench.child import Child, LinePipe
from tdserve.bench.content import check_equal, stamp, weights
from tdserve.client.client import connect

WATCH_TIMEOUT_S = 60.0


class Watcher:
    """The process, seen from the benchmark. ``close`` leaves no process behind.

    Raises:
        PeerLostError: It could not connect; its error is on standard error.
    """

    def __init__(self, address: str, transport: TransportName) -> None:
        self._child = Child("tdserve.bench.watcher", address, transport)
        try:
            self._child.hear()
        except TDServeError:
            self._child.close()
            raise

    def watch(self, name: str, newer_than: int | None) -> None:
        """Lets it wait for a version; returns when it is about to ask."""
        self._child.tell({"watch": name, "newer_than": newer_than})
        self._child.hear()

    def wait(self) -> int:
        """Returns the version when the other process has it whole."""
        return int(self._child.hear()["version"])

    def check(self, num_tensors: int, nbytes: int, number: int) -> None:
        """Lets it compare what it got with ``weights(num_tensors, nbytes)`` stamped with ``number``.

        Raises:
            CorruptDataError: They differ.
        """
        self._child.tell({"check": [num_tensors, nbytes, number]})
        difference = self._child.hear()["difference"]
        if difference is not None:
            raise CorruptDataError(path="weights seen elsewhere", expected=f"number {number}", actual=difference)

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


@lru_cache(maxsize=1)
def _make_expected(num_tensors: int, nbytes: int) -> TensorDict:
    return weights(num_tensors, nbytes)


def _difference(found: TensorDictBase, num_tensors: int, nbytes: int, number: int) -> str | None:
    expected = _make_expected(num_tensors, nbytes)
    stamp(expected, number)
    try:
        check_equal(found, expected, what="weights")
    except CorruptDataError as error:
        return str(error)
    return None


def main(address: str, transport: TransportName) -> int:
    """Follows orders until the input ends; returns the exit status.

    On one machine a version is had whole when it is mapped; over a wire it is received into the tensors of the last.
    """
    pipe = LinePipe(sys.stdin, sys.stdout)
    outs: dict[str, TensorDictBase] = {}
    watched = ""
    with connect(address, transport=transport) as client:
        pipe.send({"ready": True})
        while (order := pipe.receive()) is not None:
            if "watch" in order:
                watched = order["watch"]
                pipe.send({"waiting": True})
                newer_than = order["newer_than"]
                if transport == "shm":
                    found = client.latest(watched, newer_than=newer_than, timeout_s=WATCH_TIMEOUT_S, copy=False)
                else:
                    out = outs.get(watched)
                    found = client.latest(watched, newer_than=newer_than, timeout_s=WATCH_TIMEOUT_S, out=out)
                if found is None:
                    raise LocalProtocolError(reason="latest() gave up before its timeout")
                pipe.send({"version": found.version})
                outs = {watched: found.data}
            else:
                pipe.send({"difference": _difference(outs[watched], *order["check"])})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], check_transport(sys.argv[2])))
