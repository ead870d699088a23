from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, NotSupportedError, StoreNotFoundError, TransferAbortedError
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampled import Sampled
from tdserve.client.tables.draws.sampling import ask, receive_sample, replace_torn
from tdserve.structure.captures.capture import capture
from tests.unit.client.flat_content import rows_content

ANY = Query("any", capture(TensorDict({"a": torch.zeros(())}, [])).spec)


def sampled(index: list[int], generation: list[int] | None = None, *, with_values: bool = False) -> Sampled:
    """Rows whose content is ten times their number."""
    numbers = torch.tensor(index)
    rows: list[Any] = [TensorDict({"a": 10 * number}, []) for number in numbers]
    if with_values:
        for row, number in zip(rows, index, strict=True):
            row.set_non_tensor("v", f"value {number}")
    return Sampled(rows_content(torch.stack(rows), index, generation or [2] * len(index)), ANY)


NUM_ROWS = 64
WIDE = TensorDict({"a": torch.arange(NUM_ROWS * 300.0).view(NUM_ROWS, 300)}, [NUM_ROWS])
"""More than rides in a message."""


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """An empty ring."""
    made: tdserve.ReplayHandle = client.create_replay(name, WIDE[0], NUM_ROWS)
    return made


class Drawing:
    """One sample of a ring, step by step."""

    def __init__(
        self, client: tdserve.Client, replay: tdserve.ReplayHandle, *, num_rows: int = NUM_ROWS, **fields: Any
    ) -> None:
        self.deadline = Deadline.after(20.0)
        self.query = Query(replay.name, replay.spec.prepend((replay.capacity,)), **fields)
        self.client = client
        self.session = client.session(self.deadline)
        self.request = client.requests.take_number()
        self.asked = ask(
            client,
            self.session,
            self.request,
            self.query,
            num_rows,
            num_batches=1,
            deadline=self.deadline,
        )

    def take(self, is_over: Callable[[], bool] = lambda: False) -> Sampled:
        """The rows."""
        return receive_sample(
            self.client,
            self.session,
            self.request,
            self.asked,
            query=self.query,
            deadline=self.deadline,
            is_over=is_over,
        )


def test_ask_when_it_is_known_what_comes_then_received_without_an_answer(
    remote_client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    replay.extend(WIDE)
    drawing = Drawing(remote_client, replay)
    assert drawing.asked.posted is not None
    rows = drawing.take()
    assert rows.num_torn == 0
    index = rows.tensors[("index",)]
    assert torch.equal(rows.tensors[("a",)], WIDE["a"][index])


def test_ask_when_the_content_may_ride_in_the_answer_then_that_comes_first(
    client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    replay.extend(WIDE)
    drawing = Drawing(client, replay, num_rows=2)
    assert drawing.asked.posted is None
    assert len(drawing.take().tensors[("a",)]) == 2


def test_take_when_there_are_no_rows_yet_then_waits_for_them(
    remote_client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    drawing, is_void = Drawing(remote_client, replay), Event()

    def is_over() -> bool:
        is_void.set()
        return False

    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(drawing.take, is_over)
        assert is_void.wait(20.0)
        replay.extend(WIDE)
        index = taking.result(20.0).tensors[("index",)]
    assert set(index.tolist()) <= set(range(NUM_ROWS))
    assert replay.info()["samples"] == NUM_ROWS


@pytest.mark.parametrize("num_looks", [1, 2], ids=["before it asks again", "behind that"])
def test_take_when_the_rows_are_no_longer_needed_then_given_up(
    remote_client: tdserve.Client, replay: tdserve.ReplayHandle, num_looks: int
) -> None:
    drawing = Drawing(remote_client, replay)
    looks = iter([False] * (num_looks - 1) + [True])
    with pytest.raises(TransferAbortedError):
        drawing.take(lambda: next(looks))
    assert not drawing.session.is_lost


def test_take_when_refused_then_the_reason_and_the_session_goes_on(
    client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    drawing = Drawing(client, replay)
    client.delete(replay.name)
    again = Drawing(client, replay)
    for each in (drawing, again):
        with pytest.raises(StoreNotFoundError, match=replay.name):
            each.take()
    assert not again.session.is_lost


def test_build_when_whole_then_has_the_added_keys() -> None:
    td = sampled([3, 1], [2, 4]).build()
    assert td["a"].tolist() == [30, 10]
    assert td["index"].tolist() == [3, 1]
    assert td["generation"].tolist() == [2, 4]


def test_missing_when_rows_were_overwritten_then_replaced_by_others() -> None:
    rows = sampled([3, 1, 5], [2, -1, -1], with_values=True)
    assert rows.num_torn == 2
    assert rows.missing.tolist() == [1, 2]
    rows.replace(rows.missing, sampled([7, 8], [4, 6], with_values=True))
    assert len(rows.missing) == 0
    td = rows.build()
    assert td["a"].tolist() == [30, 70, 80]
    assert td["generation"].tolist() == [2, 4, 6]
    assert [td[row]["v"] for row in range(3)] == ["value 3", "value 7", "value 8"]


def test_split_when_of_several_batches_then_views_of_one_buffer() -> None:
    rows = sampled([1, 2, 3, 4])
    first, second = rows.split(2)
    assert (first["index"].tolist(), second["a"].tolist()) == ([1, 2], [30, 40])
    assert second.batch_size == torch.Size([2])
    assert first["a"].data_ptr() == rows.tensors[("a",)].data_ptr()
    assert len(rows.split(4)) == 1


def test_split_when_one_batch_is_changed_then_the_versions_of_the_others_stay() -> None:
    first, second = sampled([1, 2, 3, 4]).split(2)
    second["a"].add_(1)
    assert (first["a"]._version, second["a"]._version) == (0, 1)


def test_split_when_rows_have_values_then_each_batch_has_its_own() -> None:
    _, second = sampled([1, 2, 3, 4], with_values=True).split(2)
    assert [second[row]["v"] for row in range(2)] == ["value 3", "value 4"]


def test_message_when_nothing_is_said_of_partial_rows_then_only_whole_ones_are_wanted() -> None:
    message = ANY.make_message(4, 2, 1.5)
    assert (message.store, message.num_rows, message.num_batches, message.timeout_s) == ("any", 4, 2, 1.5)
    assert message.fingerprint == ANY.stored.fingerprint
    assert not message.accepts_partial
    assert not message.require
    assert not message.HasField("group_by")


def test_message_when_keys_are_required_then_names_them_and_none_means_rows_in_any_state() -> None:
    query = replace(ANY, require=(("a",), ("n", "b")), consumer="c", group_by=("g",), group_size=3, is_lease=True)
    message = query.make_message(6, 1, None)
    assert [tuple(path.parts) for path in message.require] == [("a",), ("n", "b")]
    assert (message.consumer, tuple(message.group_by.parts), message.group_size) == ("c", ("g",), 3)
    assert message.is_lease
    assert not message.accepts_partial
    assert replace(ANY, require=()).make_message(6, 1, None).accepts_partial


def sliced(*, has_flag: bool) -> Sampled:
    """Two slices of two rows."""
    rows = TensorDict({"a": torch.arange(4)}, [4])
    if has_flag:
        rows["next", "truncated"] = torch.tensor([True, False, False, False])[:, None]
    content = rows_content(rows, [0, 1, 2, 3], [2] * 4, {"slice_end": torch.tensor([False, True, False, True])})
    return Sampled(content, replace(ANY, added=("slice_end",)))


def test_sampled_when_rows_are_slices_then_their_ends_are_truncated_or_marked_by_slice_end() -> None:
    marked = sliced(has_flag=True).build()
    assert marked["next", "truncated"].flatten().tolist() == [True, True, False, True]
    assert "slice_end" not in marked
    td = sliced(has_flag=False).build()
    assert set(td.keys(True, True)) == {"a", "index", "generation", "slice_end"}
    assert td["slice_end"].tolist() == [False, True, False, True]


def test_sampled_when_a_table_adds_columns_then_they_are_keys() -> None:
    added = {"priority": torch.tensor([0.5, 2.0]), "times_sampled": torch.tensor([1, 3])}
    content = rows_content(TensorDict({"a": torch.arange(2)}, [2]), [0, 1], [2, 2], added)
    td = Sampled(content, replace(ANY, added=tuple(added))).build()
    assert (td["priority"].tolist(), td["times_sampled"].tolist()) == ([0.5, 2.0], [1, 3])
    assert td["priority"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["rows", "groups", "slices"])
def test_replace_torn_when_rows_were_overwritten_then_others_come_and_are_not_counted_again(
    client: tdserve.Client, name: str, kind: str
) -> None:
    rows = TensorDict({"a": torch.arange(NUM_ROWS), "group": torch.arange(NUM_ROWS) // 4}, [NUM_ROWS])
    limiter = tdserve.SampleToInsertRatio(1.0, min_size=NUM_ROWS, error_buffer=NUM_ROWS)  # one sample, no second
    sampler = tdserve.Slices(slice_len=4) if kind == "slices" else tdserve.Uniform()
    table = client.create_replay(name, rows[0], NUM_ROWS, sampler=sampler, limiter=limiter)
    table.extend(rows)
    fields: dict[str, dict[str, Any]] = {
        "rows": {},
        "groups": {"group_by": ("group",), "group_size": 4},
        "slices": {"added": ("slice_end",)},
    }
    drawing = Drawing(client, table, **fields[kind])
    torn = drawing.take()
    torn.tensors[("generation",)][[1, 2, 7]] = -1
    torn.num_torn = 3
    whole = replace_torn(client, drawing.query, torn, drawing.deadline, num_rows=NUM_ROWS)
    assert torch.equal(whole.tensors[("a",)], whole.tensors[("index",)])
    assert len(whole.missing) == 0
    firsts = whole.tensors[("index",)].view(-1, 4)[:, :1]
    if kind != "rows":
        assert torch.equal(whole.tensors[("index",)].view(-1, 4), firsts + torch.arange(4))
    assert table.info()["samples"] == NUM_ROWS
    with pytest.raises(DeadlineExceededError, match="SampleToInsertRatio"):
        table.sample(4, timeout_s=0)


def test_sampled_when_a_local_client_cannot_take_the_values_then_the_rows_are_there_for_the_next(
    server: tdserve.Server, local_client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"a": torch.zeros(()), "v": NonTensorData("plain")}, [])
    table = local_client.create_replay(name, like, 4, max_times_sampled=1)
    with server.client(transport="shm", allow_pickle=True) as pickling:
        row = TensorDict({"a": torch.ones(()), "v": NonTensorData(range(2))}, [])
        pickling.replay(name).extend(torch.stack([row]))
        for _ in range(2):
            with pytest.raises(NotSupportedError, match="pickle"):
                table.sample(1, timeout_s=20.0)
        assert pickling.replay(name).sample(1, timeout_s=20.0)[0]["v"] == range(2)
