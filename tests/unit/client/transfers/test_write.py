from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreNotFoundError
from tdserve.client.transfers.placing import PlacedContent
from tdserve.client.transfers.upload import SentContent
from tdserve.v1 import control_pb2
from tests.processes import wait_for

SMALL, LARGE = 3, 100_000

MANY_VALUES = 2_000
"""Of a kilobyte: they do not ride in a message."""


def rows(num_rows: int) -> TensorDict:
    """Rows that tell which they are."""
    return TensorDict({"a": torch.arange(num_rows)}, [num_rows])


def texts(start: int) -> TensorDict:
    """Rows with a value each, that tell which they are."""
    values = [NonTensorData(f"{number} ".ljust(1000, "x")) for number in range(start, start + MANY_VALUES)]
    return TensorDict({"a": torch.arange(start, start + MANY_VALUES), "v": NonTensorStack(*values)}, [MANY_VALUES])


def assert_texts(found: TensorDict, start: int) -> None:
    """Just those rows."""
    assert found["a"].tolist() == list(range(start, start + MANY_VALUES))
    assert found.get("v").tolist() == texts(start).get("v").tolist()


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """An empty ring."""
    made: tdserve.ReplayHandle = client.create_replay(name, rows(1)[0], 10 * LARGE)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
@pytest.mark.parametrize("return_early", [False, True])
def test_write_when_the_session_was_lost_before_then_stored_once(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int, return_early: bool
) -> None:
    client.session(Deadline.after(20.0)).close()
    done = replay.extend(rows(num_rows), return_early=return_early)
    indices = done.result(20.0) if return_early else done
    assert torch.equal(indices, torch.arange(num_rows))
    assert replay.info()["inserts"] == num_rows


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_the_session_is_lost_in_the_middle_then_stored_once(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int
) -> None:
    done = [replay.extend(rows(num_rows), return_early=True) for _ in range(3)]
    client.session(Deadline.after(20.0)).close()
    found = torch.cat([each.result(20.0) for each in done])
    if client.session(Deadline.after(20.0)).local is None:
        assert torch.equal(found.sort().values, torch.arange(3 * num_rows))
    assert torch.equal(replay[found]["a"], torch.arange(num_rows).repeat(3))
    # A local client's first attempts may have begun to fill other rows, which are free when it has let go of them.
    assert replay.info()["inserts"] == len(replay) == len(set(found.tolist())) == 3 * num_rows


def test_write_when_the_session_is_lost_while_its_answer_is_taken_then_that_counts_and_it_is_not_tried_again(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = client.create_queue(name, rows(1)[0], 1)
    queue.extend(rows(1))
    session, run_later = client.session(Deadline.after(20.0)), client.run_later
    retries: list[Callable[[], object]] = []

    def count(work: Callable[[], object], deadline: Deadline) -> Future[object]:
        retries.append(work)
        return run_later(work, deadline)

    monkeypatch.setattr(client, "run_later", count)
    waiting = queue.extend(rows(1), return_early=True)
    waiting.add_done_callback(lambda _: session.close())  # in the thread that brings the answer
    with queue.take(1):
        pass
    waiting.result(20.0)
    assert retries == []
    assert queue.info()["inserts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_the_session_is_lost_while_its_request_is_sent_then_tried_again_once(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tell, run_later = client.session(Deadline.after(20.0)), client.requests.report_with, client.run_later
    retries: list[Callable[[], object]] = []

    def lose(request: int) -> control_pb2.Answered | None:
        session.close()
        return tell(request)

    def count(work: Callable[[], object], deadline: Deadline) -> Future[object]:
        retries.append(work)
        return run_later(work, deadline)

    monkeypatch.setattr(client.requests, "report_with", lose)
    monkeypatch.setattr(client, "run_later", count)
    assert len(replay.extend(rows(num_rows), return_early=True).result(20.0)) == num_rows
    assert len(retries) == 1
    assert replay.info()["inserts"] == num_rows


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_interrupted_while_it_is_sent_then_over_and_never_tried_again(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay.extend(rows(1))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    batch, session = rows(num_rows), client.session(Deadline.after(20.0))
    monkeypatch.setattr(client, "run_later", pytest.fail)
    with monkeypatch.context() as patch:
        patch.setattr(SentContent, "post", interrupt)
        patch.setattr(PlacedContent, "post", interrupt)
        with pytest.raises(KeyboardInterrupt):
            replay.extend(batch, return_early=True)
    batch["a"].fill_(-1)  # the caller's again
    session.close()
    assert client.requests.num_writes == 0
    found = replay[replay.extend(rows(2))]["a"].tolist()
    assert found == [0, 1]
    assert (replay[:]["a"] >= 0).all()
    assert replay.info()["inserts"] in (3, 3 + num_rows)


@pytest.mark.slow
def test_write_when_the_session_is_lost_while_values_are_on_their_way_then_stored_once(
    client: tdserve.Client, name: str
) -> None:
    made = client.create_replay(name, texts(0)[0], 10 * MANY_VALUES)
    done = [made.extend(texts(each * MANY_VALUES), return_early=True) for each in range(3)]
    client.session(Deadline.after(20.0)).close()
    for each, future in enumerate(done):
        assert_texts(made[future.result(20.0)], each * MANY_VALUES)
    assert made.info()["inserts"] == 3 * MANY_VALUES


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_refused_early_then_the_future_has_the_error_and_the_next_works(
    client: tdserve.Client, replay: tdserve.ReplayHandle, name: str, num_rows: int
) -> None:
    client.delete(replay.name)
    with pytest.raises(StoreNotFoundError):
        replay.extend(rows(num_rows), return_early=True).result(20.0)
    again = client.create_replay(name, rows(1)[0], LARGE)
    assert torch.equal(again.extend(rows(num_rows)), torch.arange(num_rows))


@pytest.mark.slow
def test_values_when_another_worker_takes_them_than_the_one_that_writes_them_then_stored(tmp_path: Path) -> None:
    with (
        tdserve.Server(str(tmp_path / "root"), num_workers=2).start() as server,
        server.client(transport="gloo", timeout_s=20.0) as first,
    ):
        wait_for(lambda: all(worker["is_ready"] for worker in first.stats()["workers"]), "both workers")
        second = server.client(transport="gloo", timeout_s=20.0)
        clients = [first, second]
        assert {client.session(Deadline.after(20.0)).welcome.worker for client in clients} == {0, 1}
        made = first.create_replay("r", texts(0)[0], 10 * MANY_VALUES)
        for number, client in enumerate(clients):
            table = client["r"]
            done = [table.extend(texts(each), return_early=True) for each in (number, number + 10)]
            assert_texts(table[done[0].result(20.0)], number)
            assert_texts(made[done[1].result(20.0)], number + 10)
            client.init_remote(texts(number), f"t{number}")
            assert_texts(first.from_remote_init(f"t{number}"), number)
            client.send(texts(number + 5), f"t{number}")
            assert_texts(second.from_remote_init(f"t{number}"), number + 5)
        # What the second worker took it has not stored itself.
        assert "extend-0.values" in [path.name for path in (tmp_path / "root").rglob("*.values")]
        second.close()
