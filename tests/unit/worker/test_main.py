from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.framing import FrameReader, WorkerSocket, frame
from tdserve.v1 import worker_pb2
from tdserve.worker.data_worker import Worker
from tdserve.worker.handed_sockets import HandedSockets
from tests.unit.worker.peer import TIMEOUT_S, UID, StoredTensorDict


class Control:
    """The control process's end of a worker that runs in a thread."""

    def __init__(self, device: str = "") -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        self._frames = FrameReader()
        self._ready: list[bytes] = []
        self.theirs = WorkerSocket(theirs)
        self.handover, sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = Worker(self.theirs, HandedSockets(sockets), WorkerArguments(0, transfer_timeout_s=5.0, device=device))
        self.thread = Thread(target=worker.run, name="worker")
        self.thread.start()

    def send(self, order: worker_pb2.Order) -> None:
        self.socket.sendall(frame(order.SerializeToString()))

    def report(self) -> worker_pb2.Report:
        """The next report that is no heartbeat."""
        while (found := self.any_report()).HasField("heartbeat"):
            pass
        return found

    def any_report(self) -> worker_pb2.Report:
        while not self._ready:
            self._ready += self._frames.feed(self.socket.recv(1 << 16))
        return worker_pb2.Report.FromString(self._ready.pop(0))


@pytest.fixture
def control() -> Iterator[Control]:
    """A worker that has said that it is ready."""
    made = Control()
    ready = made.report()
    assert ready.order == 0
    assert ready.HasField("done")
    yield made
    made.socket.close()
    made.handover.close()
    made.thread.join(TIMEOUT_S)
    assert not made.thread.is_alive()
    made.theirs.close()


def test_worker_when_its_sessions_are_busy_then_sends_heartbeats(control: Control) -> None:
    control.send(worker_pb2.Order(order=5, session=1, discard=worker_pb2.Discard(message_nbytes=[8])))  # has no channel
    assert [control.any_report().HasField("heartbeat") for _ in range(2)] == [True, True]


@pytest.mark.parametrize("device", ["cuda:999", ""])
def test_worker_when_its_gpu_is_missing_then_reports_the_reason_and_works_on(device: str) -> None:
    control = Control(device)
    done = control.report().done
    assert done.gpu == ""
    assert bool(done.why_no_gpu) == bool(device)
    control.send(worker_pb2.Order(order=5, take_counts=worker_pb2.TakeCounts()))
    assert control.report().HasField("done")
    control.socket.close()
    control.handover.close()
    control.thread.join(TIMEOUT_S)
    control.theirs.close()


def reading(number: int, store: StoredTensorDict, *, session: int = 1) -> worker_pb2.Order:
    """An order for all of a store's small leaf."""
    order = worker_pb2.Order(order=number, session=session)
    order.send_selection.store.CopyFrom(store.ref)
    order.send_selection.keys.add(parts=["small"])
    order.send_selection.inline_bytes = 10_000
    return order


def test_orders_when_of_several_sessions_then_each_is_reported(control: Control, store: StoredTensorDict) -> None:
    for number in (1, 2, 3):
        control.send(reading(number, store, session=number))
    reports = [control.report() for _ in range(3)]
    assert sorted(report.order for report in reports) == [1, 2, 3]
    assert all(report.done.inline for report in reports)


def test_spec_when_it_went_along_once_then_known_to_every_session(control: Control, store: StoredTensorDict) -> None:
    control.send(reading(1, store, session=1))
    second = reading(2, store, session=2)
    second.send_selection.store.ClearField("spec")
    control.send(second)
    assert {control.report().order, control.report().order} == {1, 2}


def test_count_of_reads_when_asked_then_of_those_that_control_did_not_see(
    control: Control, store: StoredTensorDict
) -> None:
    control.send(reading(1, store))
    assert control.report().HasField("done")
    control.send(worker_pb2.Order(order=2, take_counts=worker_pb2.TakeCounts()))
    report = control.report()
    assert (report.order, report.done.num_reads, report.done.nbytes_moved) == (2, 0, 0)


def test_store_when_dropped_then_its_files_are_opened_anew(control: Control, store: StoredTensorDict) -> None:
    control.send(reading(1, store))
    assert control.report().HasField("done")
    control.send(worker_pb2.Order(order=3, drop_store=worker_pb2.DropStore(uid=UID)))
    dropped = control.report()
    assert (dropped.order, dropped.HasField("done")) == (3, True)
    control.send(worker_pb2.Order(session=1, close_session=worker_pb2.CloseSession()))
    store.ref.uid = UID[::-1]
    control.send(reading(2, store))
    assert control.report().failure.error == "CorruptDataError"


def test_specs_when_control_drops_them_twice_then_they_must_be_sent_again(
    control: Control, store: StoredTensorDict
) -> None:
    control.send(reading(1, store))
    assert control.report().HasField("done")
    store.ref.uid = UID[::-1]  # of a store that is not open yet
    store.ref.ClearField("spec")
    for number, error in ((2, "CorruptDataError"), (3, "LocalProtocolError")):
        control.send(worker_pb2.Order(forget_specs=worker_pb2.ForgetSpecs()))
        control.send(reading(number, store))
        assert control.report().failure.error == error
