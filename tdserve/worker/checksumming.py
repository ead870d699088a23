"""Checksums of versions, computed by a thread that yields to all others.

A low priority does not achieve this: beside such a thread the worker's others were held up for 3 to 7 ms at a time on
busy cores (measured), probably because it lost its core while it held the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.control.status import encode_failure
from tdserve.data.mapped_stores import OpenStores
from tdserve.store.weights.version_checksums import DTYPE, compute_leaf_checksum
from tdserve.store.weights.versions import VersionFile
from tdserve.structure.tensors.torch_types import to_torch, view_bytes
from tdserve.structure.trees.dtypes import NAMES
from tdserve.structure.trees.tree import Spec
from tdserve.structure.trees.version_subset import convert_floats
from tdserve.v1 import worker_pb2

MIN_POLL_S, MAX_POLL_S = 0.0005, 0.004
MAX_PAUSE_S = 0.01
"""Longest pause before each chunk of a megabyte while content moves: so even a worker that is always busy computes 100
MB/s."""


class _SupersededError(Exception):
    """A newer version of the same store exists."""


class Checksumming:
    """Carries out orders for checksums, one after the other. Threads: safe.

    Args:
        stores: Knows the structures.
        report: Sends a report to control; thread-safe.
        is_busy: Whether sessions have orders to carry out.
    """

    def __init__(
        self, stores: OpenStores, report: Callable[[worker_pb2.Report], None], is_busy: Callable[[], bool]
    ) -> None:
        self._stores = stores
        self._report = report
        self._is_busy = is_busy
        self._newest: dict[str, int] = {}  # by folder: number of the last order that is not done
        self._lock = threading.Lock()
        self._orders: SimpleQueue[worker_pb2.Order | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, order: worker_pb2.Order) -> None:
        """Queues an order, and gives up earlier ones for versions of the same folder. Called by one thread."""
        if not order.checksum_version.is_awaited:
            with self._lock:
                self._newest[_get_folder(order)] = order.order
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tdserve-checksums", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread after the order that it is working on."""
        self._newest.clear()
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            report = worker_pb2.Report(order=order.order)
            try:
                report.done.checksums = self._compute_checksums(order)
            except _SupersededError:
                report.done.SetInParent()
            except TDServeError as error:  # such as a version that was retired meanwhile
                report.failure.CopyFrom(encode_failure(error))
            with self._lock:
                if self._newest.get(_get_folder(order)) == order.order:
                    del self._newest[_get_folder(order)]
            self._report(report)

    def _compute_checksums(self, order: worker_pb2.Order) -> bytes:
        wanted = order.checksum_version.version
        folder = _get_folder(order)

        def is_superseded() -> bool:
            return not order.checksum_version.is_awaited and self._newest.get(folder) != order.order

        def give_way() -> None:
            began = time.monotonic()
            poll_s = MIN_POLL_S
            while not is_superseded() and self._is_busy():
                if time.monotonic() - began > MAX_PAUSE_S:
                    break
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, MAX_POLL_S)
            if is_superseded():
                raise _SupersededError

        give_way()
        spec = self._stores.get_spec(wanted.fingerprint)
        dtype = NAMES.get(order.checksum_version.dtype, "")
        with VersionFile.open(wanted.path, spec) as file:
            contents = file.iter_leaf_contents() if not dtype else _iter_converted(file, convert_floats(spec, dtype))
            # each is cut out in its turn: for thousands at once no other thread would get the interpreter's lock
            return np.array([compute_leaf_checksum(leaf, give_way) for leaf in contents], DTYPE).tobytes()


def _iter_converted(file: VersionFile, sent: Spec) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of every leaf as it is sent, each converted in its turn."""
    for path, leaf in sent.tensors:
        yield view_bytes(file.leaves[path].to(to_torch(leaf.dtype)).contiguous()).numpy()


def _get_folder(order: worker_pb2.Order) -> str:
    return order.checksum_version.version.path.rpartition("/")[0]
