from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict

import tdserve
from tdserve.base.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    KeyNotFoundError,
    SpecMismatchError,
    StoreNotFoundError,
    TransportError,
    WriterFailedError,
)
from tdserve.client.session import session_client
from tdserve.client.tables.writers import row_sender, writer
from tdserve.client.tables.writers.nstep import NStep
from tdserve.client.tables.writers.writer import ReplayWriter
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.settings import Settings
from tests.errors import raises
from tests.processes import wait_for
from tests.unit.client.tables.recording import WAIT_S, TimedTable, row


class Step(TensorClass):
    """A row as a class."""

    x: torch.Tensor
    note: str


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A ring of a thousand rows of one number."""
    made: tdserve.ReplayHandle = client.create_replay(name, row(0), 1000)
    return made


def numbers(replay: tdserve.ReplayHandle) -> list[int]:
    """Returns the numbers of all rows, the oldest first, as long as none was overwritten."""
    found: list[int] = replay[:]["x"].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 64, 5000])
def test_append_when_the_block_ends_then_all_rows_are_stored_in_order(replay: tdserve.ReplayHandle, batch: int) -> None:
    with ReplayWriter(replay, batch=batch) as subject:
        for number in range(300):
            subject.append(row(number))
    assert numbers(replay) == list(range(300))
    assert (subject.num_appended, subject.num_acknowledged) == (300, 300)
    assert (subject.num_under_way, subject.num_buffered) == (0, 0)
    assert "300 rows stored" in repr(subject)


def test_append_when_the_row_changes_afterwards_then_stored_as_it_was(replay: tdserve.ReplayHandle) -> None:
    td = row(0)
    with ReplayWriter(replay) as subject:
        for number in range(100):
            td["x"].fill_(number)
            subject.append(td)
    assert numbers(replay) == list(range(100))


def test_append_when_rows_have_values_then_copied_too(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, row(0, v=TensorDict({"text": "a"})), 100)
    with ReplayWriter(replay, batch=8) as subject:
        for number in range(20):
            subject.append(row(number, v=TensorDict({"text": f"row {number}"})))
    found = replay[:]
    assert found["x"].tolist() == list(range(20))
    assert found["v", "text"] == [f"row {number}" for number in range(20)]


def test_append_when_the_writer_brings_some_keys_then_the_others_are_written_later(
    client: tdserve.Client, name: str
) -> None:
    nested = TensorDict({"y": torch.tensor(0), "z": torch.tensor(0)}, [])
    replay = client.create_replay(
        name, TensorDict({"x": torch.tensor(0), "score": torch.tensor(0.0), "n": nested}, []), 8
    )
    with ReplayWriter(replay, batch=2, keys=["x", ("n", "y")]) as subject:
        for number in range(3):
            subject.append(TensorDict({"x": torch.tensor(number), "n": {"y": torch.tensor(number)}}, []))
        with raises(SpecMismatchError, key="score"):
            subject.append(
                TensorDict({"x": torch.tensor(9), "n": {"y": torch.tensor(9)}, "score": torch.tensor(0.0)}, [])
            )
    replay.set_at_("score", torch.arange(3.0), [0, 1, 2])
    with pytest.raises(DeadlineExceededError, match=r"\('n', 'z'\) is missing in 3"):
        replay.sample(1, timeout_s=0)
    replay.set_at_(("n", "z"), torch.arange(3), [0, 1, 2])
    batch = replay.sample(20)
    assert torch.equal(batch["score"], batch["x"].float())
    assert torch.equal(batch["n", "y"], batch["n", "z"])
    with raises(KeyNotFoundError, key="reward"):
        ReplayWriter(replay, keys=["x", "reward"])


def test_append_when_rows_are_a_tensorclass_then_so_is_what_is_read(client: tdserve.Client, name: str) -> None:
    steps = [Step(x=torch.tensor(number), note=f"{number}", batch_size=[]) for number in range(5)]
    replay = client.create_replay(name, steps[0], 10)
    with ReplayWriter(replay) as subject:
        for step in steps:
            subject.append(step)
    found = replay[:]
    assert type(found) is Step
    assert found.x.tolist() == list(range(5))
    assert list(found.note) == list("01234")


def test_append_when_rows_have_dimensions_then_each_is_one_row(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, TensorDict({"x": torch.zeros(2, 3)}, [2]), 10)
    with ReplayWriter(replay) as subject:
        for number in range(3):
            subject.append(TensorDict({"x": torch.full((2, 3), float(number))}, [2]))
    assert replay[:].batch_size == (3, 2)
    assert replay[:]["x"][:, 1, 2].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("bad", [row(0, y=torch.ones(1)), TensorDict({"x": torch.tensor(1.0)}), row(0).unsqueeze(0)])
def test_append_when_a_row_does_not_fit_then_not_taken_and_the_writer_goes_on(
    replay: tdserve.ReplayHandle, bad: TensorDict
) -> None:
    with ReplayWriter(replay) as subject:
        subject.append(row(1))
        with pytest.raises(SpecMismatchError, match=replay.name):
            subject.append(bad)
        assert subject.num_appended == 1
        subject.append(row(2))
    assert numbers(replay) == [1, 2]


@pytest.mark.parametrize("priority", [-1.0, math.nan, math.inf, "x", torch.ones(2), [1.0]])
def test_append_when_the_priority_is_none_then_error_and_not_taken(replay: tdserve.ReplayHandle, priority: Any) -> None:
    with ReplayWriter(replay) as subject:
        with pytest.raises(InvalidRequestError) as raised:
            subject.append(row(1), priority=priority)
        assert subject.num_appended == 0
    assert raised.value.argument == "priority"


def append_all(subject: ReplayWriter, numbers: Iterable[int]) -> None:
    """Rows of these numbers."""
    for number in numbers:
        subject.append(row(number))


def test_append_when_priorities_are_given_then_they_reach_the_table() -> None:
    table = TimedTable()
    table.settings = Settings(sampler=Prioritized())
    with ReplayWriter(table) as subject:
        for priority in (1, 0.5, torch.tensor(0.25), torch.tensor([0.0])):
            subject.append(row(0), priority=priority)
        subject.append(row(1))
    assert [None if call["priority"] is None else list(call["priority"]) for call in table.calls] == [
        [1.0, 0.5, 0.25, 0.0],
        None,
    ]


def test_append_when_the_table_has_no_priorities_then_refused_and_the_writer_goes_on() -> None:
    table = TimedTable()
    with ReplayWriter(table) as subject:
        with raises(InvalidRequestError, argument="priority"):
            subject.append(row(0), priority=1.0)
        subject.append(row(1))
    assert subject.num_acknowledged == 1


def test_append_when_there_is_no_room_then_waits_for_the_timeout_of_the_client() -> None:
    table = TimedTable(timeout_s=0.05)
    subject = ReplayWriter(table, max_bytes=2000)
    table.hold()
    with pytest.raises(DeadlineExceededError) as raised:
        append_all(subject, range(100))
    assert raised.value.timeout_s == 0.05
    num_rows = subject.num_appended
    assert subject.num_under_way + subject.num_buffered == num_rows
    table.let()
    wait_for(lambda: not subject.num_under_way, "the rows that were on their way")
    subject.close(timeout_s=60.0)
    assert table.numbers == list(range(num_rows))


def test_end_trajectory_when_called_then_the_newest_row_is_marked() -> None:
    table = TimedTable()
    with ReplayWriter(table, batch=3) as subject:
        for number in range(10):
            subject.append(row(number))
            if number % 4 == 3:
                subject.end_trajectory()
    assert table.ends == [3, 7]


def test_flush_when_called_then_stored_when_it_returns(replay: tdserve.ReplayHandle) -> None:
    with ReplayWriter(replay, flush_s=None) as subject:
        subject.flush()
        subject.append(row(5))
        assert len(replay) == 0
        subject.flush()
        assert numbers(replay) == [5]
        assert subject.num_acknowledged == 1


def test_close_when_called_again_then_nothing_happens_and_other_calls_raise_closed_error(
    replay: tdserve.ReplayHandle,
) -> None:
    subject = ReplayWriter(replay)
    subject.append(row(1))
    subject.close()
    subject.close()
    calls: list[Callable[[], None]] = [lambda: subject.append(row(2)), subject.flush, subject.end_trajectory]
    for call in calls:
        with pytest.raises(ClosedError, match=replay.name):
            call()
    assert numbers(replay) == [1]


def append_and_raise(subject: ReplayWriter) -> None:
    """An actor that fails in its second step."""
    with subject:
        subject.append(row(1))
        raise ZeroDivisionError


def test_block_when_it_raises_then_rows_are_sent_and_the_exception_goes_on(replay: tdserve.ReplayHandle) -> None:
    with pytest.raises(ZeroDivisionError):
        append_and_raise(ReplayWriter(replay, flush_s=None))
    assert numbers(replay) == [1]


def test_block_when_it_raises_and_nothing_can_be_sent_then_it_is_still_that_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "ABANDON_FLUSH_S", 0.05)
    table = TimedTable()
    table.hold()
    subject = ReplayWriter(table)
    with pytest.raises(ZeroDivisionError):
        append_and_raise(subject)
    with pytest.raises(ClosedError):
        subject.append(row(2))
    table.let()


def test_writer_when_dropped_then_its_rows_are_still_sent() -> None:
    table = TimedTable()
    subject = ReplayWriter(table, flush_s=None)
    subject.append(row(1))
    del subject
    gc.collect()
    table.wait_stored(1)


def test_writer_when_the_table_is_deleted_then_errors_have_the_numbers_of_stored_rows(
    client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    subject = ReplayWriter(replay)
    subject.append(row(1))
    subject.flush()
    client.delete(replay.name)
    subject.append(row(2))
    with pytest.raises(WriterFailedError) as raised:
        subject.flush()
    assert isinstance(raised.value.__cause__, StoreNotFoundError)
    assert (raised.value.num_acknowledged, raised.value.num_unknown, raised.value.num_unsent) == (1, 0, 1)
    with pytest.raises(WriterFailedError):
        subject.append(row(3))
    with pytest.raises(WriterFailedError):
        subject.close()
    subject.close()


def test_writer_when_the_client_is_closed_before_it_then_its_rows_are_stored(
    server: tdserve.Server, replay: tdserve.ReplayHandle
) -> None:
    with server.client() as other:
        subject = ReplayWriter(other.replay(replay.name), flush_s=None)
        for number in range(5):
            subject.append(row(number))
    assert len(replay) == 5
    subject.close()
    with pytest.raises(ClosedError):
        subject.append(row(9))


def test_writer_when_the_client_is_closed_and_there_is_no_room_then_writer_failed_by_closed_error(
    server: tdserve.Server, client: tdserve.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_client, "CLOSE_FLUSH_S", 0.2)
    queue = client.create_queue("full", like=row(0), max_size=2)
    with server.client() as other:
        subject = ReplayWriter(other.queue("full"), batch=1, flush_s=None)
        for number in range(5):
            subject.append(row(number))
    with pytest.raises(WriterFailedError) as raised:
        subject.close()
    assert isinstance(raised.value.__cause__, ClosedError)
    assert len(queue) == raised.value.num_acknowledged == 2
    client.delete("full")


@pytest.mark.slow
def test_writer_when_the_server_is_gone_then_the_next_calls_raise_writer_failed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sender, "PROBE_S", 0.1)
    with tdserve.Server(str(tmp_path_factory.mktemp("gone"))).start() as own, own.client() as client:
        subject = client.create_replay("frames", row(0), 100).writer(flush_s=None)
        assert isinstance(subject, ReplayWriter)
        subject.append(row(1))
        subject.flush()
        client.timeout_s = 0.5
        own.shutdown()
        subject.append(row(2))
        with pytest.raises(WriterFailedError) as raised:
            subject.flush(WAIT_S)
        assert isinstance(raised.value.__cause__, TransportError)
        assert (raised.value.num_acknowledged, raised.value.num_unknown, raised.value.num_unsent) == (1, 1, 0)
        with pytest.raises(WriterFailedError):
            subject.append(row(3))


def test_n_step_when_given_then_the_table_gets_n_step_rows(client: tdserve.Client, name: str) -> None:
    def step(number: int) -> TensorDict:
        return row(
            number,
            reward=torch.tensor(1.0),
            done=torch.tensor(number % 5 == 4),
            next=TensorDict({"x": torch.tensor(number + 1)}),
        )

    replay = client.create_replay(name, step(0), 100)
    with ReplayWriter(replay, batch=4, n_step=NStep(3, 0.5)) as subject:
        for number in range(12):
            subject.append(step(number))
    found = replay[:]
    assert found["x"].tolist() == list(range(12))
    assert found["next", "x"].tolist() == [3, 4, 5, 5, 5, 8, 9, 10, 10, 10, 12, 12]
    assert found["reward"].tolist() == [*[1.75, 1.75, 1.75, 1.5, 1.0] * 2, 1.5, 1.0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch", 0),
        ("batch", 1.5),
        ("max_bytes", 0),
        ("max_bytes", 100),
        ("flush_s", 0),
        ("flush_s", -1.0),
        ("flush_s", math.nan),
        ("flush_s", True),
        ("flush_s", "1"),
        ("timeout_s", -1.0),
        ("timeout_s", "x"),
        ("n_step", NStep(2, 0.9)),
    ],
)
def test_writer_when_an_argument_is_out_of_range_then_error_names_it(argument: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ReplayWriter(TimedTable(), **{argument: value})
    assert raised.value.argument == argument


def test_policy_version_when_set_anew_then_rows_keep_the_one_they_were_appended_under() -> None:
    table = TimedTable()
    table.settings = Settings(policy="p")
    with ReplayWriter(table, batch=8, policy_version=2) as subject:
        subject.append(row(0))
        subject.policy_version = 3
        assert subject.policy_version == 3
        subject.append(row(1))
        subject.policy_version = None
        subject.append(row(2))
    versions = [call["policy_version"] for call in table.calls]
    assert (table.batches, versions[0].tolist(), versions[1]) == ([[0, 1], [2]], [2, 3], None)
    for bad in (-1, True, 1.5):
        with raises(InvalidRequestError, argument="policy_version"):
            subject.policy_version = bad  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match="without a policy"):
        ReplayWriter(TimedTable(), policy_version=0)
