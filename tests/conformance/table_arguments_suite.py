"""The tests of what tables and queues take as arguments, and what their iterators count, over every transport.

Each store is made with ``shards="all"``. On a single server it is a store of that server; on several servers all of
them share it. So handles of both kinds take the same arguments, refuse the same ones, and return the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.conformance.suite import Suite
from tests.errors import raises
from tests.processes import wait_for

NUM_ROWS = 60

ROW = TensorDict({"number": torch.tensor(0), "wide": torch.zeros(3)}, [])

RANK: dict[str, Any] = {"rank": 0, "world_size": 1}

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prefech": 2}, TypeError, "prefech"),
    ({"prefetch": 0}, tdserve.InvalidRequestError, "prefetch"),
    ({"timeout_s": -1}, tdserve.InvalidRequestError, "timeout_s"),
    ({"require": "nope"}, tdserve.KeyNotFoundError, "nope"),
    ({"require": 3}, tdserve.InvalidRequestError, "require"),
    ({"group_by": "nope", "group_size": 2}, tdserve.KeyNotFoundError, "nope"),
    ({"group_size": 2}, tdserve.InvalidRequestError, "group_by"),
    ({"max_lag": 1}, tdserve.InvalidRequestError, "max_lag"),
    ({"numpy": True, "device": "cpu"}, tdserve.InvalidRequestError, "numpy"),
    ({"device": "nowhere"}, tdserve.InvalidRequestError, "device"),
    ({"consumer": 3}, tdserve.InvalidRequestError, "consumer"),
    ({"consumer": "c", "min_rows": 9}, tdserve.InvalidRequestError, "min_rows"),
    ({"min_rows": 2}, tdserve.InvalidRequestError, "min_rows"),
    ({"min_rows": 2, "consumer": "c", **RANK}, tdserve.InvalidRequestError, "min_rows"),
    ({"balance": "number"}, tdserve.InvalidRequestError, "balance"),
    ({"balance": "nope", **RANK}, tdserve.KeyNotFoundError, "nope"),
    ({"drop": "x"}, tdserve.InvalidRequestError, "drop"),
    ({"drop": 0}, tdserve.InvalidRequestError, "drop"),
    ({"drop": True}, tdserve.InvalidRequestError, "drop"),
    ({"drop": 1.0, **RANK}, tdserve.InvalidRequestError, "a rank drops no batch"),
    ({"prefetch": 100, **RANK}, tdserve.InvalidRequestError, "prefetches at most 8"),
]
"""Arguments of ``batches`` of a replay, and how they are refused."""

REFUSED_OF_QUEUES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"maxlag": 1}, TypeError, "maxlag"),
    ({"max_lag": 1}, tdserve.InvalidRequestError, "max_lag"),
    ({"min_rows": 9}, tdserve.InvalidRequestError, "min_rows"),
    ({"timeout_s": -1}, tdserve.InvalidRequestError, "timeout_s"),
    ({"numpy": True, "device": "cpu"}, tdserve.InvalidRequestError, "numpy"),
]


def fill(table: Any) -> torch.Tensor:
    """Writes numbered rows, of several writers; returns the numbers of their places."""
    number = torch.arange(NUM_ROWS)
    rows = TensorDict({"number": number, "wide": number[:, None].expand(-1, 3).float()}, [NUM_ROWS])
    written = [table.extend(rows[start : start + 20], writer=1 + start // 20) for start in range(0, NUM_ROWS, 20)]
    return torch.cat(written)


def list_names(cases: list[tuple[dict[str, Any], type[Exception], str]]) -> list[str]:
    """Returns the names of the arguments of each case."""
    return ["-".join(arguments) for arguments, _, _ in cases]


class TableArgumentsSuite(Suite):
    """The requirements of arguments. A subclass gives ``connect``."""

    @pytest.mark.parametrize(("arguments", "error", "match"), REFUSED, ids=list_names(REFUSED))
    def test_batches_when_an_argument_is_wrong_then_refused_at_once(
        self, client: tdserve.Client, name: str, arguments: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        table: Any = client.create_replay(name, ROW, 90, shards="all")
        with pytest.raises(error, match=match):
            table.batches(4, **arguments)

    @pytest.mark.parametrize(("arguments", "error", "match"), REFUSED_OF_QUEUES, ids=list_names(REFUSED_OF_QUEUES))
    def test_batches_of_a_queue_when_an_argument_is_wrong_then_refused_at_once(
        self, client: tdserve.Client, name: str, arguments: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        queue: Any = client.create_queue(name, ROW, 90, shards="all")
        with pytest.raises(error, match=match):
            queue.batches(4, **arguments)

    def test_batches_when_of_a_rank_then_only_those_count_that_were_returned(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, ROW, 90, shards="all")
        fill(table)
        with table.batches(4, prefetch=3, **RANK) as batches:
            first = next(batches)["number"].tolist()
            wait_for(lambda: table.info()["samples"] == 4 * 4, "batches that are drawn ahead")
        assert table.info()["samples"] == 4 * 4  # the one that was returned, and three
        second = table.sample(4, **RANK)["number"].tolist()
        with table.batches(4, prefetch=3, **RANK) as batches:
            third = next(batches)["number"].tolist()
        with table.batches(4, step=1, prefetch=3, **RANK) as batches:
            assert next(batches)["number"].tolist() == second
        steps = [table.sample(4, step=step, **RANK)["number"].tolist() for step in range(3)]
        assert steps == [first, second, third]

    def test_batches_when_the_caller_has_had_a_step_elsewhere_then_it_does_not_come_again(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, ROW, 90, shards="all")
        fill(table)
        with table.batches(4, prefetch=2, **RANK) as batches:
            found = [next(batches)["number"].tolist(), table.sample(4, **RANK)["number"].tolist()]
            found.append(next(batches)["number"].tolist())
        assert found == [table.sample(4, step=step, **RANK)["number"].tolist() for step in range(3)]

    def test_batches_when_all_of_them_wait_too_long_then_the_iterator_raises(
        self, client: tdserve.Client, name: str
    ) -> None:
        table = client.create_replay(name, ROW, 90, shards="all")
        fill(table)
        with table.batches(4, drop=1e-9, timeout_s=0.5) as batches:
            for _ in range(2):
                with pytest.raises(tdserve.DeadlineExceededError, match="did not wait too long"):
                    next(batches)

    def test_priorities_when_read_then_float32(self, client: tdserve.Client, name: str) -> None:
        table = client.create_replay(name, ROW, 90, shards="all", sampler=tdserve.Prioritized())
        index = fill(table)
        table.update_priority(index, torch.arange(NUM_ROWS).float())
        found = table.get_priorities(index)
        assert found.dtype == torch.float32
        assert found.tolist() == [*range(NUM_ROWS)]
        assert table.get_priorities(torch.empty(0, dtype=torch.int64)).dtype == torch.float32

    @pytest.mark.parametrize("priority", [2, 2.0, torch.tensor(2.0)], ids=["int", "float", "tensor"])
    def test_priority_when_one_for_all_rows_then_each_has_it_or_the_error_is_that_of_a_table_without_them(
        self, client: tdserve.Client, name: str, priority: Any
    ) -> None:
        table = client.create_replay(name, ROW, 90, shards="all", sampler=tdserve.Prioritized())
        index = fill(table)
        assert table.update_priority(index, priority) == 0
        assert table.get_priorities(index).tolist() == [2.0] * NUM_ROWS
        assert table.update_priority(index[:0], priority) == 0
        with pytest.raises(tdserve.InvalidRequestError, match=f"1 priorities for {NUM_ROWS} rows"):
            table.update_priority(index, [2.0])
        client.delete(name)
        plain = client.create_replay(name, ROW, 90, shards="all")
        with pytest.raises(tdserve.InvalidRequestError, match="has neither a sampler nor a remover"):
            plain.update_priority(fill(plain), priority)

    @pytest.mark.parametrize("num_given", [2, 59])
    def test_rows_when_there_is_not_a_generation_for_each_then_refused_and_nothing_changed(
        self, client: tdserve.Client, name: str, num_given: int
    ) -> None:
        queue: Any = client.create_queue(name, ROW, 90, shards="all")
        fill(queue)
        rows = queue.take(NUM_ROWS, ack=False)
        lacking = {"index": rows["index"], "generation": rows["generation"][:num_given]}
        for call in (queue.ack, queue.delete):
            with pytest.raises(tdserve.InvalidRequestError, match=f"{num_given} generations for {NUM_ROWS} rows"):
                call(lacking)
        queue.ack(rows)

    @pytest.mark.parametrize("num_given", [None, 1, 20, 59, 61])
    def test_update_when_there_is_not_a_generation_for_each_row_then_refused_and_nothing_changed(
        self, client: tdserve.Client, name: str, num_given: int | None
    ) -> None:
        table = client.create_replay(name, ROW, 90, shards="all")
        index = fill(table)
        generations = table.find_generations(index)
        given = None if num_given is None else torch.cat([generations, generations])[:num_given]
        with raises(tdserve.InvalidRequestError, argument="generation"):
            table.update_if_present(index, {"number": torch.full((NUM_ROWS,), -1)}, generation=given)
        assert table[index]["number"].tolist() == [*range(NUM_ROWS)]
        values = {"number": torch.arange(NUM_ROWS) + 100}
        assert table.update_if_present(index, values, generation=generations).all()
        assert table[index]["number"].tolist() == [*range(100, 100 + NUM_ROWS)]

    def test_taken_rows_when_read_outside_a_block_then_the_error_shows_how_and_others_get_them(
        self, client: tdserve.Client, name: str
    ) -> None:
        queue = client.create_queue(name, ROW, 90, shards="all")
        fill(queue)
        taken = queue.take(NUM_ROWS)
        assert f"{NUM_ROWS} rows of {name!r} on lease; use it in a with block" in repr(taken)
        with pytest.raises(tdserve.InvalidRequestError, match=rf"{name}.*with queue\.take\(n\) as rows"):
            taken["number"]
        del taken
        with queue.take(NUM_ROWS) as rows:
            assert sorted(rows["number"].tolist()) == [*range(NUM_ROWS)]

    def test_store_when_opened_as_another_kind_then_the_error_names_the_call(
        self, client: tdserve.Client, name: str
    ) -> None:
        client.create_replay(f"{name}-replay", ROW, 90, shards="all")
        client.create_kv(f"{name}-kv", shards="all")
        wrong: list[tuple[Callable[[str], Any], str, str]] = [
            (client.kv, f"{name}-replay", r"kv\(\) is not possible while .* is not a keyed store"),
            (client.queue, f"{name}-replay", r"queue\(\) is not possible while .* is not a queue"),
            (client.replay, f"{name}-kv", r"replay\(\) is not possible while .* is not a replay"),
        ]
        for call, store, match in wrong:
            with pytest.raises(tdserve.WrongStateError, match=f"^{match}"):
                call(store)
