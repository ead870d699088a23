from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.control.status import decode_failure
from tdserve.data.mapped_stores import OpenStores
from tdserve.store.weights.version_checksums import compute_leaf_checksum
from tdserve.store.weights.versions import VersionFile
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import to_torch, view_bytes
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import WIRE
from tdserve.structure.trees.version_subset import convert_floats
from tdserve.v1 import worker_pb2
from tdserve.worker.checksumming import MAX_PAUSE_S, Checksumming
from tests.memory import count_bytes

TIMEOUT_S = 20.0
TD = TensorDict({"b": torch.rand(500_000), "a": torch.arange(3, dtype=torch.int16), "e": torch.zeros(0)}, [])
CAPTURED = capture(TD)


class Worker:
    """What the thread stands in; ``busy`` makes it wait, and so does an ``answers`` that is not set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: SimpleQueue[worker_pb2.Report] = SimpleQueue()
        self.busy = Event()
        self.asked, self.answers = Event(), Event()
        self.answers.set()
        stores = OpenStores(writes_values=False)
        stores.learn(CAPTURED.spec.fingerprint, codec.encode(CAPTURED.spec))
        self.checksumming = Checksumming(stores, self.reports.put, self._is_busy)
        self._last_order = 0

    def _is_busy(self) -> bool:
        self.asked.set()
        assert self.answers.wait(TIMEOUT_S)
        return self.busy.is_set()

    def make(self, version: int, *, folder: str = "w") -> str:
        """A version's file."""
        (self.folder / folder).mkdir(exist_ok=True)
        file = VersionFile.create(self.folder / folder / f"{version}.safetensors", CAPTURED.spec)
        for path, leaf in file.leaves.items():
            leaf.copy_(CAPTURED.tensors[path])
        file.seal()
        return str(file.path)

    def put(self, path: str, *, dtype: str = "", is_awaited: bool = False) -> int:
        """An order for its checksums."""
        self._last_order += 1
        order = worker_pb2.Order(order=self._last_order)
        order.checksum_version.version.path = path
        order.checksum_version.dtype, order.checksum_version.is_awaited = WIRE.get(dtype, 0), is_awaited  # type: ignore[assignment]
        order.checksum_version.version.fingerprint = CAPTURED.spec.fingerprint
        self.checksumming.put(order)
        return self._last_order

    def report(self) -> worker_pb2.Report:
        """The next one."""
        return self.reports.get(timeout=TIMEOUT_S)


def test_checksums_when_a_client_waits_for_them_then_converted_and_not_given_up_for_a_newer_version(
    worker: Worker,
) -> None:
    worker.busy.set()
    awaited = worker.put(worker.make(1), dtype="bfloat16", is_awaited=True)
    newer = worker.put(worker.make(2))
    reports = {report.order: report for report in (worker.report(), worker.report())}
    converted = convert_floats(CAPTURED.spec, "bfloat16")
    tensors = [CAPTURED.tensors[path].to(to_torch(leaf.dtype)) for path, leaf in converted.tensors]
    expected = [compute_leaf_checksum(view_bytes(tensor).numpy()) for tensor in tensors]
    assert np.frombuffer(reports[awaited].done.checksums, "<u8").tolist() == expected
    assert reports[newer].done.checksums not in (b"", reports[awaited].done.checksums)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.checksumming.close()


def test_order_when_the_version_is_there_then_the_checksums_of_its_leaves_in_canonical_order(worker: Worker) -> None:
    number = worker.put(worker.make(1))
    report = worker.report()
    assert report.order == number
    expected = [
        compute_leaf_checksum(CAPTURED.tensors[path].view(torch.uint8).numpy()) for path, _ in CAPTURED.spec.tensors
    ]
    assert np.frombuffer(report.done.checksums, "<u8").tolist() == expected


def test_order_when_another_of_the_same_store_comes_then_it_is_given_up(worker: Worker) -> None:
    worker.answers.clear()
    first = worker.put(worker.make(1))
    assert worker.asked.wait(TIMEOUT_S)  # it gives way at its beginning
    second, third = worker.put(worker.make(2)), worker.put(worker.make(1, folder="other"))
    worker.answers.set()
    found = {report.order: len(report.done.checksums) for report in (worker.report() for _ in range(3))}
    assert found == {first: 0, second: 24, third: 24}


def test_order_when_the_worker_never_rests_then_it_is_done_all_the_same(worker: Worker) -> None:
    worker.busy.set()
    worker.put(worker.make(1))
    assert len(worker.report().done.checksums) == 24
    assert MAX_PAUSE_S < 0.1


def test_order_when_the_version_is_gone_then_failure_and_the_next_one_is_carried_out(worker: Worker) -> None:
    path = worker.make(1)
    Path(path).unlink()
    worker.put(path)
    report = worker.report()
    assert isinstance(decode_failure(report.failure), CorruptDataError)
    worker.put(worker.make(2))
    assert worker.report().HasField("done")


@pytest.mark.slow
def test_order_when_carried_out_then_nothing_of_its_folder_is_kept(worker: Worker) -> None:
    sizes = []
    for number in range(60):
        worker.put(worker.make(1, folder=f"w{number}"))
        worker.report()
        sizes.append(count_bytes(worker.checksumming))
    assert sizes[-1] < sizes[19] + 40 * sys.getsizeof(str(worker.folder))
