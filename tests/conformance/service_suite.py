"""The tests that the service must pass over every transport: a class provides ``connect`` and ``transport`` and
inherits the tests.

Small content is part of messages, large content goes over the transport. Both must give the same results.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.base.errors import (
    CapacityError,
    ClosedError,
    DeadlineExceededError,
    SpecMismatchError,
    StoreExistsError,
    StoreNotFoundError,
)
from tests.conformance.limited_leases_suite import LimitedLeasesSuite
from tests.conformance.row_deletions_suite import RowDeletionsSuite
from tests.conformance.row_reads_suite import RowReadsSuite
from tests.conformance.suite import Connect
from tests.conformance.table_arguments_suite import TableArgumentsSuite
from tests.errors import raises
from tests.processes import wait_for

TIMEOUT_S = 30.0
SHORT_S = 0.05

SMALL, LARGE = 3, 40_000
"""Numbers of rows: some hundred bytes, and 10 MB in several messages."""

FEW, MANY = 100, 5_000
"""Numbers of values of a kilobyte: few make one message, many make several."""


def rows(num_rows: int, start: int = 0) -> TensorDict:
    """Returns rows that show their number in every leaf; above ``LARGE`` each leaf has messages of its own."""
    number = torch.arange(start, start + num_rows)
    wide = number[:, None].expand(-1, 60).float().contiguous()
    nested = TensorDict({"flag": number % 2 == 0, "wide": wide}, [num_rows])
    return TensorDict({"number": number, "nested": nested}, [num_rows])


def text(number: int) -> str:
    """Returns a kilobyte of text that contains a number."""
    return f"{number} ".ljust(1000, "x")


def texts(num_rows: int, start: int = 0) -> TensorDict:
    """Returns rows with a value each that contains the row's number."""
    number = torch.arange(start, start + num_rows)
    values = NonTensorStack(*(NonTensorData(text(each)) for each in number.tolist()))
    return TensorDict({"number": number, "text": values}, [num_rows])


def assert_texts(found: TensorDict, numbers: list[int]) -> None:
    """Checks that a batch has exactly these rows of ``texts``."""
    assert found["number"].tolist() == numbers
    assert found.get("text").tolist() == [text(number) for number in numbers]


def assert_equal(found: TensorDict, expected: TensorDict) -> None:
    """Checks that keys, batch size and content are equal."""
    assert found.batch_size == expected.batch_size
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert bool((found == expected).all())


@pytest.mark.integration
class ServiceSuite(RowReadsSuite, RowDeletionsSuite, TableArgumentsSuite, LimitedLeasesSuite):
    """The requirements of the service over every transport.

    A subclass gives ``connect``, which returns a fresh client of one server that may have other stores, and
    ``transport``, the name that statistics show.
    """

    # ------------------------------------------------------------ tensordicts

    @pytest.mark.parametrize("num_rows", [0, SMALL, LARGE])
    def test_init_remote_when_fetched_then_equal(self, client: tdserve.Client, name: str, num_rows: int) -> None:
        client.init_remote(rows(num_rows), name)
        assert_equal(client.from_remote_init(name), rows(num_rows))

    def test_init_remote_when_without_batch_and_with_values_then_equal(self, client: tdserve.Client, name: str) -> None:
        sent = TensorDict({"scalar": torch.tensor(1.5), "text": "ä", "large": torch.rand(1_000_000)}, [])
        client.init_remote(sent, name)
        found = client.from_remote_init(name)
        assert found["text"] == "ä"
        assert_equal(found.exclude("text"), sent.exclude("text"))

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_init_remote_when_the_name_is_taken_then_refused_and_the_next_call_works(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        client.init_remote(rows(num_rows), name)
        with pytest.raises(StoreExistsError):
            client.init_remote(rows(num_rows, 5), name)
        assert_equal(client.from_remote_init(name), rows(num_rows))
        client.init_remote(rows(num_rows, 5), name, exists_ok=True)
        assert_equal(client.from_remote_init(name), rows(num_rows, 5))

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_send_when_received_then_equal_and_of_the_same_version(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        first = client.init_remote(rows(num_rows), name)
        version = client.send(rows(num_rows, 7), name)
        into = rows(num_rows)
        assert client.recv(into, name, newer_than=first) == version > first
        assert_equal(into, rows(num_rows, 7))
        assert client.recv(into, name, newer_than=version, timeout_s=0) is None

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_recv_when_it_does_not_fit_then_refused_unchanged_and_the_next_call_works(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        client.init_remote(rows(num_rows, 7), name)
        other = rows(num_rows).exclude("number")
        with raises(SpecMismatchError, key="number"):
            client.recv(other, name)
        assert_equal(other, rows(num_rows).exclude("number"))
        assert_equal(client.from_remote_init(name), rows(num_rows, 7))

    @pytest.mark.parametrize("index", [(..., 0), ([2, 0], [1, 0]), (slice(1, 3), ..., 1), (-1, [1, 0], 0)], ids=str)
    def test_get_at_when_the_index_goes_on_behind_the_rows_then_as_of_a_local_tensordict(
        self, client: tdserve.Client, name: str, index: Any
    ) -> None:
        td = TensorDict({"x": torch.arange(24.0).view(4, 3, 2), "n": TensorDict({"y": torch.rand(4, 2, 2)}, [4, 2, 2])})
        td.batch_size = torch.Size([4])
        client.init_remote(td, name)
        store = client[name]
        for at in (store, store.select("x", "n")):
            assert torch.equal(at.get_at("x", index), td.get_at("x", index))
            assert torch.equal(at.get_at(("n", "y"), index), td.get_at(("n", "y"), index))
        assert_equal(store.get_at("n", index), td.get_at("n", index))

    def test_set_at_when_rows_are_very_many_and_in_any_order_then_as_of_a_local_tensordict(
        self, client: tdserve.Client, name: str
    ) -> None:
        num_rows = 300_000
        anyhow, numbers = torch.randperm(num_rows), torch.arange(num_rows)
        plain = TensorDict({"x": torch.zeros(num_rows, dtype=torch.int64)}, [num_rows])
        handle = client.memmap(plain, name)
        handle.set_at_("x", numbers, anyhow)
        plain.set_at_("x", numbers, anyhow)
        assert handle["x"].equal(plain["x"])
        assert handle.get_at("x", anyhow).equal(numbers)
        table = client.create_replay(f"{name}-table", like=plain[0], capacity=num_rows)
        table.extend(plain)
        table.set_at_("x", numbers, anyhow.numpy())
        assert table[anyhow]["x"].equal(numbers)
        assert table[anyhow[:200_000].view(2, -1)]["x"].equal(numbers[:200_000].view(2, -1))
        assert table.delete(anyhow[:200_000]) == 200_000
        assert table[:]["x"].sort().values.equal(numbers[200_000:])

    def test_from_remote_init_when_keys_are_named_then_only_those(self, client: tdserve.Client, name: str) -> None:
        client.init_remote(rows(LARGE), name)
        assert_equal(client.from_remote_init(name, keys=[("nested", "wide")]), rows(LARGE).select(("nested", "wide")))

    def test_from_remote_init_when_the_store_comes_later_then_waits(self, connect: Connect, name: str) -> None:
        with connect() as writer, connect() as reader, ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(reader.from_remote_init, name, timeout_s=TIMEOUT_S)
            writer.init_remote(rows(LARGE), name)
            assert_equal(waiting.result(TIMEOUT_S), rows(LARGE))

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_write_when_the_store_was_deleted_then_refused_and_the_next_call_works(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        client.init_remote(rows(num_rows), name)
        handle = client[name]
        assert isinstance(handle, tdserve.StoreHandle)
        client.delete(name)
        with pytest.raises(StoreNotFoundError):
            handle[:] = rows(num_rows, 7)
        client.init_remote(rows(num_rows, 9), name)
        assert_equal(client.from_remote_init(name), rows(num_rows, 9))

    def test_handle_when_rows_are_chosen_then_as_of_a_local_tensordict(self, client: tdserve.Client, name: str) -> None:
        handle = client.memmap(rows(LARGE), name)
        local = rows(LARGE)
        for index in (slice(10, None, 3), torch.tensor([5, 5, 1]), -1):
            assert_equal(handle[index], local[index])
        handle[5:25_000] = local[5:25_000] = rows(24_995, 70_000)
        assert_equal(handle.to_tensordict(), local)

    # ------------------------------------------------------------ replay

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_sample_when_extended_then_rows_are_whole_and_known(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        replay = client.create_replay(name, rows(1)[0], capacity=2 * num_rows)
        for start in (0, num_rows, 2 * num_rows):
            indices = replay.extend(rows(num_rows, start))
            assert torch.equal(indices, torch.arange(start, start + num_rows) % (2 * num_rows))
        sample = replay.sample(num_rows)
        number = sample["number"]
        assert bool((number >= num_rows).all())
        assert torch.equal(sample["index"], number % (2 * num_rows))
        assert torch.equal(sample["nested", "wide"], number[:, None].expand(-1, 60).float())
        assert torch.equal(sample["nested", "flag"], number % 2 == 0)
        assert bool((sample["generation"] % 2 == 0).all())
        assert len(replay) == 2 * num_rows

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_extend_when_many_are_under_way_then_all_are_stored(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        replay = client.create_replay(name, rows(1)[0], capacity=8 * num_rows)
        batches = [rows(num_rows, start * num_rows) for start in range(8)]
        futures = [replay.extend(batch, return_early=True) for batch in batches]
        for batch, future in zip(batches, futures, strict=True):
            assert_equal(replay[future.result(TIMEOUT_S)].select(*batch.keys()), batch)
        assert replay.info()["inserts"] == 8 * num_rows

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_leaves_when_added_later_then_rows_before_and_rows_without_them_have_zeros(
        self, connect: Connect, name: str, num_rows: int
    ) -> None:
        with connect() as one, connect() as another:
            mine = one.create_replay(name, rows(1)[0], capacity=2 * num_rows)
            mine.extend(rows(num_rows))
            theirs = another.replay(name)
            batch = rows(num_rows, num_rows)
            batch["nested", "late"] = batch["number"][:, None].expand(-1, 5).contiguous()
            with pytest.raises(SpecMismatchError, match="add_leaves"):
                theirs.extend(batch)
            theirs.add_leaves(batch[0])
            theirs.extend(batch)
            for handle in (mine, theirs):
                sample = handle.sample(2 * num_rows)
                number = sample["number"]
                late = torch.where(number < num_rows, 0, number)
                assert torch.equal(sample["nested", "late"], late[:, None].expand(-1, 5))
                assert torch.equal(sample["nested", "wide"], number[:, None].expand(-1, 60).float())
            mine.extend(rows(num_rows, 2 * num_rows))
            mine.extend(rows(num_rows, 3 * num_rows))
            assert not theirs[:]["nested", "late"].any()
            one.delete(name)

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_sample_when_there_are_too_few_rows_then_refused_and_the_next_call_works(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        replay = client.create_replay(name, rows(1)[0], capacity=num_rows, min_size=num_rows)
        replay.extend(rows(num_rows - 1))
        with pytest.raises(DeadlineExceededError):
            replay.sample(num_rows, timeout_s=SHORT_S)
        replay.extend(rows(1, num_rows - 1))
        sample = replay.sample(num_rows)
        assert torch.equal(sample["index"], sample["number"])

    def test_sample_when_rows_come_later_then_waits(self, connect: Connect, name: str) -> None:
        with connect() as writer, connect() as reader, ThreadPoolExecutor(1) as thread:
            replay = writer.create_replay(name, rows(1)[0], capacity=LARGE)
            waiting = thread.submit(reader.replay(name).sample, LARGE, timeout_s=TIMEOUT_S)
            replay.extend(rows(LARGE))
            sample = waiting.result(TIMEOUT_S)
            assert torch.equal(sample["index"], sample["number"])

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE // 4])
    def test_batches_when_iterated_then_endless_and_closed_without_a_trace(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        replay = client.create_replay(name, rows(1)[0], capacity=num_rows)
        replay.extend(rows(num_rows))
        with replay.batches(num_rows) as batches:
            for batch in itertools.islice(batches, 9):
                assert torch.equal(batch["index"], batch["number"])
        sample = replay.sample(num_rows)
        assert torch.equal(sample["index"], sample["number"])

    # ------------------------------------------------------------ values

    @pytest.mark.parametrize("num_rows", [SMALL, FEW, MANY])
    def test_values_when_written_then_read_whole_by_key_and_by_index(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        client.init_remote(texts(num_rows), name)
        assert_texts(client.from_remote_init(name), list(range(num_rows)))
        client.send(texts(num_rows, 7), name)
        handle = client[name]
        handle[1:] = texts(num_rows - 1, 50)
        expected = [7, *range(50, 49 + num_rows)]
        assert_texts(handle.to_tensordict(), expected)
        assert_texts(handle[::2], expected[::2])
        only = client.from_remote_init(name, keys=["text"])
        assert only.get("text").tolist() == [text(number) for number in expected]

    @pytest.mark.parametrize("num_rows", [SMALL, FEW, MANY])
    def test_values_when_extended_many_at_once_then_each_row_has_its_own(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        replay = client.create_replay(name, texts(1)[0], capacity=6 * num_rows)
        batches = [texts(num_rows, start * num_rows) for start in range(6)]
        futures = [replay.extend(batch, return_early=True) for batch in batches]
        for number, future in enumerate(futures):
            expected = list(range(number * num_rows, (number + 1) * num_rows))
            assert_texts(replay[future.result(TIMEOUT_S)], expected)
        sample = replay.sample(num_rows)
        assert_texts(sample, sample["number"].tolist())
        with replay.batches(num_rows) as found:
            for batch in itertools.islice(found, 5):
                assert_texts(batch, batch["number"].tolist())

    @pytest.mark.parametrize("num_rows", [SMALL, FEW, MANY])
    def test_values_when_refused_then_nothing_is_written_and_the_next_call_works(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        deleted = client.create_replay(f"{name}-deleted", texts(1)[0], capacity=num_rows)
        client.delete(deleted.name)
        with pytest.raises(StoreNotFoundError):
            deleted.extend(texts(num_rows))
        client.init_remote(texts(num_rows), name)
        with pytest.raises(SpecMismatchError):
            client.send(texts(num_rows + 1), name)
        assert_texts(client.from_remote_init(name), list(range(num_rows)))

    def test_values_when_there_is_no_room_for_them_then_refused_and_fewer_fit(
        self, client: tdserve.Client, name: str
    ) -> None:
        replay = client.create_replay(name, texts(1)[0], capacity=2 * MANY, max_object_bytes=4 << 20)
        with pytest.raises(CapacityError, match=name):
            replay.extend(texts(MANY))
        assert len(replay) == 0
        assert_texts(replay[replay.extend(texts(FEW))], list(range(FEW)))

    # ------------------------------------------------------------ weights

    @pytest.mark.parametrize("num_rows", [SMALL, LARGE])
    def test_latest_when_published_then_one_version_whole(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        into = rows(num_rows)
        for number in (1, 2, 3, 4):
            assert client.publish(name, rows(num_rows, number), metadata={"step": number}) == number
            found = client.latest(name, out=into)
            assert found is not None
            assert (found.version, found.metadata, found.data) == (number, {"step": number}, into)
            assert_equal(into, rows(num_rows, number))
        assert client.latest(name, newer_than=4, timeout_s=0) is None

    def test_latest_when_a_version_comes_later_then_waits(self, connect: Connect, name: str) -> None:
        with connect() as writer, connect() as reader, ThreadPoolExecutor(1) as thread:
            writer.publish(name, rows(LARGE))
            waiting = thread.submit(reader.latest, name, newer_than=1, timeout_s=TIMEOUT_S)
            writer.publish(name, rows(LARGE, 5))
            found = waiting.result(TIMEOUT_S)
            assert found is not None
            assert_equal(found.data, rows(LARGE, 5))

    # ------------------------------------------------------------ many at once

    def test_client_when_used_by_many_threads_then_each_gets_its_own(self, client: tdserve.Client, name: str) -> None:
        replay = client.create_replay(name, rows(1)[0], capacity=100 * LARGE // SMALL)

        def work(worker: int) -> None:
            mine = f"{name}-{worker}"
            for step in range(3):
                num_rows = (SMALL, LARGE)[(worker + step) % 2]
                client.init_remote(rows(num_rows, worker), f"{mine}-{step}")
                assert_equal(client.from_remote_init(f"{mine}-{step}"), rows(num_rows, worker))
                client.publish(mine, rows(LARGE, step))
                indices = replay.extend(rows(num_rows, step))
                assert_equal(replay[indices].exclude("index", "generation"), rows(num_rows, step))
                found = client.latest(mine)
                assert found is not None
                assert_equal(found.data, rows(LARGE, step))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))

    def test_clients_when_one_leaves_then_the_other_goes_on(self, connect: Connect, name: str) -> None:
        with connect() as staying:
            with connect() as leaving:
                leaving.init_remote(rows(LARGE), name)
                assert_equal(staying.from_remote_init(name), rows(LARGE))
            with pytest.raises(ClosedError):
                leaving.from_remote_init(name)
            staying.send(rows(LARGE, 3), name)
            assert_equal(staying.from_remote_init(name), rows(LARGE, 3))

    def test_stats_when_content_moved_then_name_the_transport(
        self, client: tdserve.Client, name: str, transport: str
    ) -> None:
        client.init_remote(rows(LARGE), name)
        before = client.stats()["transports"][transport]
        client.from_remote_init(name)

        def counts() -> dict[str, int] | None:
            """Returns the counts after a transfer was counted, which happens a moment after its content arrived."""
            found: dict[str, int] = client.stats()["transports"][transport]
            return found if found["transfers_out"] > before["transfers_out"] else None

        after = wait_for(counts, "the count of the transfer")
        assert client.stats()["transport"] == transport
        assert after["transfers_out"] == before["transfers_out"] + 1
        moved = after["bytes_out"] - before["bytes_out"]
        nbytes = rows(LARGE).bytes()
        assert nbytes <= moved < nbytes + 4096
