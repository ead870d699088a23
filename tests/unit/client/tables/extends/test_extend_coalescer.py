from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.config import DEFAULT_INLINE_BYTES
from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, PeerLostError, TransferAbortedError
from tdserve.client.session.calls.background_calls import MAX_THREADS
from tdserve.client.session.calls.cancellation import Cancellation
from tdserve.client.session.session import Session
from tdserve.client.tables.extends import extend_coalescer
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.transfers.write import write_early
from tests.unit.client.tables.numbered import rows

pytestmark = pytest.mark.integration

CAPACITY = 4_096

MakeReplay = Callable[..., ReplayHandle]


@pytest.fixture
def make_replay(client: tdserve.Client, name: str) -> MakeReplay:
    return lambda **settings: client.create_replay(name, rows(1)[0], CAPACITY, **settings)


def extend_all(replay: ReplayHandle, batches: list[TensorDict], **arguments: Any) -> list[torch.Tensor]:
    futures = [replay.extend(batch, return_early=True, **arguments) for batch in batches]
    return [future.result(30.0) for future in futures]


@pytest.mark.slow
def test_submit_when_many_are_under_way_then_they_share_requests_and_each_gets_its_own_rows(
    client: tdserve.Client,
    make_replay: MakeReplay,
) -> None:
    replay = make_replay()
    replay.extend(rows(1))
    before = client.stats()["transports"]
    batches = [rows(64, 64 * number) for number in range(50)]
    found = extend_all(replay, batches)
    after = client.stats()["transports"]
    for batch, index in zip(batches, found, strict=True):
        assert (replay[index]["number"] == batch["number"]).all()
        assert (replay[index]["obs"] == batch["obs"]).all()
    num_transfers = sum(after[name]["transfers_in"] - before.get(name, {}).get("transfers_in", 0) for name in after)
    assert 0 < num_transfers < len(batches) // 2
    assert len(set(torch.cat(found).tolist())) == 50 * 64


def test_submit_when_batches_are_large_then_leaves_that_change_their_place_in_the_layout_arrive_whole(
    client: tdserve.Client,
    name: str,
) -> None:
    like = TensorDict({"large": torch.zeros(1_024), "small": torch.zeros((), dtype=torch.int64)}, [])
    replay = client.create_replay(name, like, CAPACITY)
    batches = [
        TensorDict({"large": torch.full((128, 1_024), float(number)), "small": torch.full((128,), number)}, [128])
        for number in range(12)  # half a MiB each: the leaf is a small one alone and a large one joined
    ]
    for number, index in enumerate(extend_all(replay, batches)):
        found = replay[index]
        assert (found["large"] == number).all()
        assert (found["small"] == number).all()


@pytest.mark.slow
def test_submit_when_large_batches_are_written_in_place_then_they_share_requests_too(
    local_client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"number": torch.tensor(0), "obs": torch.zeros(1 << 16)}, [])
    replay = local_client.create_replay(name, like, 256)
    before = local_client.stats()["transports"].get("shm", {}).get("transfers_in", 0)
    batches = [
        TensorDict({"number": torch.full((16,), each), "obs": torch.full((16, 1 << 16), float(each))}, [16])
        for each in range(12)  # 4 MiB each
    ]
    for number, index in enumerate(extend_all(replay, batches)):
        found = replay[index]
        assert (found["number"] == number).all()
        assert (found["obs"] == number).all()
    assert local_client.stats()["transports"]["shm"]["transfers_in"] - before < len(batches)


def test_submit_when_priorities_differ_in_form_then_every_row_has_its_own(make_replay: MakeReplay) -> None:
    replay = make_replay(sampler=tdserve.Prioritized(alpha=1.0, eps=0.0))
    futures = [replay.extend(rows(8, 8 * number), priority=float(number), return_early=True) for number in range(8)]
    futures += [
        replay.extend(rows(8, 64 + 8 * number), priority=torch.arange(8.0), return_early=True) for number in range(8)
    ]
    for future in futures:
        future.result(30.0)
    sample = replay.sample(2_000)
    expected = torch.cat([torch.arange(8.0).repeat_interleave(8), torch.arange(8.0).repeat(8)])
    assert (sample["priority"] == expected[sample["number"]]).all()


def test_submit_when_joined_ones_are_more_than_a_limiter_lets_through_then_sent_one_by_one(
    client: tdserve.Client,
    make_replay: MakeReplay,
) -> None:
    replay = make_replay()
    # Changed behind this handle's back, as another process may do it.
    client.replay(replay.name).set_limiter(tdserve.Queue(2_000))
    found = extend_all(replay, [rows(64, 64 * number) for number in range(30)])
    assert len(set(torch.cat(found).tolist())) == 30 * 64


def test_submit_when_a_part_is_refused_then_only_that_one_fails(
    client: tdserve.Client, make_replay: MakeReplay
) -> None:
    replay = make_replay()
    client.replay(replay.name).set_limiter(tdserve.Queue(100))
    futures = [replay.extend(rows(number), return_early=True) for number in (10, 20, 101, 30)]
    assert [len(futures[number].result(30.0)) for number in (0, 1, 3)] == [10, 20, 30]
    with pytest.raises(InvalidRequestError, match="101 rows never fits"):
        futures[2].result(30.0)


def test_extend_when_others_wait_then_does_not_overtake_them(make_replay: MakeReplay) -> None:
    replay = make_replay(sampler=tdserve.Fifo())
    futures = [replay.extend(rows(16, 16 * number), return_early=True) for number in range(20)]
    replay.extend(rows(1, 320))
    assert [len(future.result(20.0)) for future in futures] == [16] * 20
    assert replay.sample(321)["number"].tolist() == list(range(321))


def test_extend_when_another_thread_has_taken_others_to_send_them_then_does_not_overtake_them(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = make_replay(sampler=tdserve.Fifo())
    has_taken, may_send = Event(), Event()

    def write_late(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert may_send.wait(30.0)
        return write_early(*arguments, **options)

    monkeypatch.setattr(extend_coalescer, "write_early", write_late)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: replay.extend(rows(16), return_early=True).result(30.0))
        assert has_taken.wait(30.0)
        second = threads.submit(replay.extend, rows(1, 16))
        try:
            with pytest.raises(FutureTimeoutError):
                second.result(0.2)
        finally:
            may_send.set()
        assert (len(first.result(30.0)), len(second.result(30.0))) == (16, 1)
    assert replay.sample(17)["number"].tolist() == list(range(17))


def test_extend_when_cancelled_while_others_wait_then_it_is_not_stored_and_they_are(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, cancellation = make_replay(sampler=tdserve.Fifo()), Cancellation()
    has_taken, may_send = Event(), Event()

    def write_late(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert may_send.wait(30.0)
        return write_early(*arguments, **options)

    def extend() -> None:
        with cancellation.watch():
            replay.extend(rows(1, 16))

    monkeypatch.setattr(extend_coalescer, "write_early", write_late)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: replay.extend(rows(16), return_early=True).result(30.0))
        try:
            assert has_taken.wait(30.0)
            second = threads.submit(extend)
            cancellation.cancel()
            with pytest.raises(TransferAbortedError):
                second.result(30.0)
            third = replay.extend(rows(1, 17), return_early=True)
        finally:
            may_send.set()
        assert (len(first.result(30.0)), len(third.result(30.0))) == (16, 1)
    assert replay.sample(len(replay))["number"].tolist() == [*range(16), 17]


def test_submit_when_the_client_is_closed_then_every_future_ends(
    client: tdserve.Client, make_replay: MakeReplay
) -> None:
    replay = make_replay()
    futures = [replay.extend(rows(64), return_early=True) for _ in range(60)]
    client.close()
    assert all(
        future.exception(30.0) is None or isinstance(future.exception(), tdserve.TDServeError) for future in futures
    )


@pytest.mark.slow
def test_submit_when_the_server_is_gone_before_there_is_a_session_then_all_fail_in_their_time(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server, server.client(transport="gloo") as client:
        client.create_replay("replay", rows(1)[0], CAPACITY)
        with server.client(transport="gloo") as fresh:
            replay = fresh.replay("replay")
            server.shutdown()
            began_s = time.monotonic()
            futures = [replay.extend(rows(1), return_early=True, timeout_s=1.0) for _ in range(64)]
            for future in futures:
                assert isinstance(future.exception(30.0), tdserve.TDServeError)
            assert time.monotonic() - began_s < 15.0  # one after the other it would be half a minute


@contextmanager
def renewing(client: tdserve.Client) -> Iterator[Session]:
    """A session that has lost its channel, with all threads of its client busy in the block."""
    session = client.session(Deadline.after(30.0))
    session.contents.get(session.contents.current)
    session.replace_channel(session.contents.current, PeerLostError(peer="the server", reason="a test"))
    may_end = Event()
    for _ in range(MAX_THREADS):
        client.run_later(lambda: may_end.wait(30.0))
    try:
        yield session
    finally:
        may_end.set()


@pytest.mark.slow
def test_submit_when_a_channel_was_lost_then_small_extends_are_sent_at_once_and_keep_their_order(
    remote_client: tdserve.Client, name: str
) -> None:
    queue = remote_client.create_queue(name, rows(1)[0], 100)  # which joins nothing
    with renewing(remote_client) as session:
        futures = [queue.extend(rows(1, number), return_early=True) for number in range(100)]
        assert futures[0].result(30.0).tolist() == [0]  # with no thread to wait for
        assert session.contents.current.is_renewing
    for future in futures:
        future.result(30.0)
    assert queue[:]["number"].tolist() == list(range(100))


def test_submit_when_a_channel_was_lost_then_extends_that_need_it_wait_for_the_first_and_keep_their_order(
    remote_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[str]()

    def note_request(*arguments: Any, what: str, **options: Any) -> Future[Any]:
        sent.append(what)
        return write_early(*arguments, what=what, **options)

    num_rows = 2 * DEFAULT_INLINE_BYTES // rows(1).bytes()
    queue = remote_client.create_queue(name, rows(1)[0], 8 * num_rows)
    with renewing(remote_client):
        monkeypatch.setattr(extend_coalescer, "write_early", note_request)
        futures = [queue.extend(rows(num_rows, number * num_rows), return_early=True) for number in range(6)]
        futures.append(queue.extend(rows(1, 6 * num_rows), return_early=True))  # needs none, and overtakes nobody
        assert len(sent) == 1
        assert not any(future.done() for future in futures)
    for future in futures:
        future.result(30.0)
    assert queue[:]["number"].tolist() == list(range(6 * num_rows + 1))


def histories(first: int, num_rows: int = 8) -> TensorDict:
    """Rows with values and tensors that differ in length."""
    numbers = range(first, first + num_rows)
    return TensorDict(
        {
            "text": NonTensorStack(*[f"text {number}" for number in numbers]),
            "call": NonTensorStack(*[{"number": number, "is_odd": number % 2 == 1} for number in numbers]),
            "tokens": torch.nested.nested_tensor(
                [torch.arange(number % 7 + 1) + number for number in numbers], layout=torch.jagged
            ),
        },
        [num_rows],
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_submit_when_rows_have_values_then_they_share_requests_and_each_row_has_its_own(
    server: tdserve.Server, name: str, transport: str
) -> None:
    like = TensorDict({"text": "", "call": NonTensorData({}), "tokens": torch.arange(3)}, [])
    with server.client(transport=transport) as client:
        replay = client.create_replay(name, like, CAPACITY, ragged=["tokens"])
        replay.extend(histories(0))
        before = client.stats()["transports"]
        batches = [histories(8 * number) for number in range(40)]
        found = extend_all(replay, batches)
        after = client.stats()["transports"]
        num_transfers = sum(after[each]["transfers_in"] - before.get(each, {}).get("transfers_in", 0) for each in after)
        assert 0 < num_transfers < len(batches)
        for batch, index in zip(batches, found, strict=True):
            read = replay[index]
            assert read.get("text").tolist() == batch.get("text").tolist()
            assert read.get("call").tolist() == batch.get("call").tolist()
            pairs = zip(read.get("tokens").unbind(), batch.get("tokens").unbind(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_submit_when_a_value_is_that_of_all_rows_then_each_batch_keeps_its_own(
    client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"number": torch.tensor(0), "text": ""}, [])
    replay = client.create_replay(name, like, CAPACITY)
    batches = [TensorDict({"number": torch.full((4,), each), "text": f"all {each}"}, [4]) for each in range(20)]
    for number, index in enumerate(extend_all(replay, batches)):
        assert replay[index].get("text").tolist() == [f"all {number}"] * 4
