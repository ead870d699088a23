from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import PeerLostError, RemoteProtocolError, TooLargeError
from tdserve.control import framing
from tdserve.control.framing import MAX_FRAME_BYTES, ControlSocket, FrameReader, FrameWriter, WorkerSocket, frame
from tdserve.v1 import worker_pb2


@pytest.mark.slow
@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
def test_frames_when_they_arrive_in_any_pieces_then_come_out_whole(contents: list[bytes], lengths: list[int]) -> None:
    stream = b"".join(map(frame, contents))
    reader = FrameReader()
    found, at, turn = [], 0, 0
    while at < len(stream):
        length = lengths[turn % len(lengths)]
        found += reader.feed(stream[at : at + length])
        at, turn = at + length, turn + 1
    assert found == contents


def test_frame_when_longer_than_allowed_then_error_before_its_content_came() -> None:
    assert FrameReader().feed(struct.pack("<I", MAX_FRAME_BYTES)) == []
    with pytest.raises(RemoteProtocolError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def report(number: int) -> worker_pb2.Report:
    """A report of some length."""
    return worker_pb2.Report(order=number, done=worker_pb2.Worked(inline=bytes(1000 * (number + 1))))


def test_sockets_when_joined_then_orders_and_reports_pass(sockets: tuple[socket.socket, socket.socket]) -> None:
    worker = WorkerSocket(sockets[1])
    received: list[worker_pb2.Report] = []

    async def control() -> None:
        arrived, lost = asyncio.Event(), asyncio.Event()

        def on_report(found: worker_pb2.Report) -> None:
            received.append(found)
            arrived.set()

        end = await ControlSocket.open(sockets[0], on_report, lost.set)
        for number in (1, 2):
            end.order(worker_pb2.Order(order=number, tag=5))
        await asyncio.wait_for(arrived.wait(), 5.0)
        end.close()
        await asyncio.wait_for(lost.wait(), 5.0)
        with pytest.raises(PeerLostError):
            end.order(worker_pb2.Order(order=3))

    def work() -> list[int]:
        numbers: list[int] = []
        while orders := worker.receive_orders():
            numbers += [order.order for order in orders]
            worker.report(report(len(numbers)))
        return numbers

    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        asyncio.run(control())
        assert working.result(5.0) == [1, 2]
    assert received[0] == report(received[0].order)


def test_order_when_its_rest_is_long_then_it_leaves_in_pieces_before_the_next_and_the_worker_merges_it(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    worker = WorkerSocket(sockets[1])
    rest = worker_pb2.Order(send_rows=worker_pb2.SendRows(rows=bytes(range(200)) * 20_000))
    num_turns = 0

    async def control() -> None:
        nonlocal num_turns
        lost = asyncio.Event()
        end = await ControlSocket.open(sockets[0], received.append, lost.set)
        order = worker_pb2.Order(order=1, send_rows=worker_pb2.SendRows(generations=b"12345678"))
        end.order(order, rest.SerializeToString())
        end.order(worker_pb2.Order(order=2))
        with ThreadPoolExecutor(1) as thread:
            working = asyncio.get_running_loop().run_in_executor(thread, read)
            while not working.done():
                await asyncio.sleep(0)
                num_turns += 1
            end.close()
        await asyncio.wait_for(lost.wait(), 5.0)

    def read() -> None:
        while len(found) < 2:
            found.extend(worker.receive_orders())
        worker.close()

    found: list[worker_pb2.Order] = []
    received: list[worker_pb2.Report] = []
    asyncio.run(control())
    assert [order.order for order in found] == [1, 2]
    assert found[0].send_rows.rows == rest.send_rows.rows
    assert found[0].send_rows.generations == b"12345678"
    assert num_turns > 4


def test_order_when_it_is_longer_than_any_frame_then_refused_and_the_worker_goes_on(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)

    async def control() -> None:
        end = await ControlSocket.open(sockets[0], lambda report: None, lambda: None)
        with pytest.raises(TooLargeError):
            end.order(worker_pb2.Order(order=1), bytes(1000))
        end.order(worker_pb2.Order(order=2))
        end.close()

    asyncio.run(control())
    assert [order.order for order in WorkerSocket(sockets[1]).receive_orders()] == [2]


def test_reports_when_of_many_threads_then_never_mix(sockets: tuple[socket.socket, socket.socket]) -> None:
    worker = WorkerSocket(sockets[1])
    reader = FrameReader()
    found: list[int] = []
    with ThreadPoolExecutor(8) as threads:
        sending = [threads.submit(worker.report, report(number)) for number in range(200)]
        while len(found) < 200:
            for content in reader.feed(sockets[0].recv(1 << 16)):
                message = worker_pb2.Report.FromString(content)
                assert message == report(message.order)
                found.append(message.order)
        for each in sending:
            each.result(5.0)
    assert sorted(found) == list(range(200))


def test_orders_when_the_control_process_goes_then_none(sockets: tuple[socket.socket, socket.socket]) -> None:
    worker = WorkerSocket(sockets[1])
    sockets[0].close()
    assert worker.receive_orders() == []
    worker.report(report(1))  # nobody is there to hear it


def test_close_when_a_thread_reads_then_it_wakes(sockets: tuple[socket.socket, socket.socket]) -> None:
    worker = WorkerSocket(sockets[1])
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(worker.receive_orders)
        worker.close()
        assert reading.result(5.0) == []


def test_writer_when_the_other_end_is_gone_then_nothing_is_logged(
    sockets: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    async def control() -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=sockets[0])
        writer = FrameWriter()
        writer.open(transport)
        sockets[1].close()
        for _ in range(100):  # in one turn of the loop; the loop learns of it later
            writer.write(bytes(1000))
        assert transport.is_closing()

    asyncio.run(control())
    assert caplog.text == ""
