"""The server's event loop does no work in proportion to rows: no caller waits for it longer than a few milliseconds."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdserve
from tests.integration.loop_costs import NUM_TRIES, WatchedServer, long_ones

pytestmark = [pytest.mark.integration, pytest.mark.full]  # it measures time, which says little beside other tests

SIZES = [
    # A limit that a loop of Python over all rows exceeds on any machine, and nothing else on a slow and busy one, where
    # the longest callback (4 ms on a machine of its own) has taken 13 ms.
    pytest.param((1_000_000, 0.03), id="1e6"),
    pytest.param((10_000_000, 0.005), id="1e7", marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
]
"""Numbers of rows, with the seconds of CPU that a callback of the loop may take."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    """A server whose event loop is measured."""
    folder = tmp_path_factory.mktemp("watched")
    with WatchedServer(folder / "root", folder) as server:
        yield server


@pytest.fixture
def watched(running: WatchedServer) -> Iterator[WatchedServer]:
    """The same server, without stores of other tests."""
    yield running
    with running.client(transport="gloo", timeout_s=110.0) as client:
        for name in client.stores():
            client.delete(name)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_a_tensordict_has_very_many_rows_then_no_call_keeps_it_busy(
    watched: WatchedServer, transport: str, size: tuple[int, float]
) -> None:
    num_rows, limit_s = size
    with watched.client(transport=transport, timeout_s=110.0) as client:
        store = client.memmap(TensorDict({"x": torch.zeros(num_rows, dtype=torch.uint8)}, [num_rows]), "s")
        ones = torch.ones(num_rows, dtype=torch.uint8)
        mask = torch.arange(num_rows) % 2 == 0
        small, anyhow = TensorDict({"x": ones}, [num_rows]), torch.randperm(num_rows)

        def create_and_delete() -> None:
            client.memmap(small, "made")
            client.delete("made")

        calls: dict[str, Callable[[], object]] = {
            "create": create_and_delete,
            "write all": lambda: store.set_("x", ones),
            "write a slice": lambda: store.set_at_("x", ones[7:-7], slice(7, -7)),
            "write every third": lambda: store.set_at_("x", ones[::3], slice(0, None, 3)),
            "write a mask": lambda: store.set_at_("x", ones[mask], mask),
            "write a list": lambda: store.set_at_("x", ones, anyhow),
            "read a list": lambda: store.get_at("x", anyhow),
            "read all": lambda: store["x"],
            "read a slice": lambda: store.get_at("x", slice(7, -7)),
            "read a mask": lambda: store.get_at("x", mask),
            "add a key": lambda: store.set("y", ones),
            "describe": lambda: client.describe("s"),
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_values_of_very_many_rows_are_written_then_no_call_keeps_it_busy(
    watched: WatchedServer, transport: str, size: tuple[int, float]
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"text": NonTensorData("a")}, [])
    with watched.client(transport=transport, timeout_s=110.0) as client:
        store = client.memmap_like(row, "s", batch_size=[num_rows])
        some = torch.randperm(num_rows)[: num_rows // 8]
        is_chosen = torch.zeros(num_rows, dtype=torch.bool).index_fill(0, some, True)
        calls: dict[str, Callable[[], object]] = {
            "write a list": lambda: store.set_at_("text", "b", some),
            "write a mask": lambda: store.set_at_("text", "c", is_chosen),
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize(
    ("transport", "sampler"),
    [("gloo", tdserve.Uniform()), ("shm", tdserve.Prioritized()), ("gloo", tdserve.Lifo())],
    ids=["gloo-uniform", "shm-prioritized", "gloo-lifo"],
)
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_a_table_has_very_many_rows_then_no_call_keeps_it_busy(
    watched: WatchedServer, transport: str, size: tuple[int, float], sampler: object
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
    with watched.client(transport=transport, timeout_s=110.0) as client:
        table = client.create_replay("r", like=row, capacity=num_rows, sampler=sampler)
        for _ in range(0, num_rows + num_rows // 10, num_rows // 20):  # once round, and a little further
            table.extend(row.expand(num_rows // 20).clone())

        def create_and_delete() -> None:
            client.create_replay("made", like=row, capacity=num_rows, sampler=sampler)
            client.delete("made")

        mask = torch.arange(num_rows) % 2 == 0
        few, starts = row.expand(256).clone(), iter(range(num_rows // 2, num_rows, num_rows // 8))
        anyhow, ones = torch.randperm(num_rows), torch.ones(num_rows, dtype=torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "create": create_and_delete,
            "extend": lambda: table.extend(few),
            "extend by very many rows": lambda: table.extend(row.expand(num_rows // 3).clone()),
            "sample": lambda: table.sample(256),
            "sample very many rows": lambda: table.sample(num_rows // 10),
            "read all": lambda: table[:],
            "read a row": lambda: table[5],
            "read the last row": lambda: table[-1],
            "read a mask": lambda: table[mask],
            "read some rows": lambda: table[torch.tensor([5, 6])],
            "read a slice": lambda: table[10:20],
            "write some rows": lambda: table.set_at_("x", ones[:256], anyhow[:256]),
            "write very many rows": lambda: table.set_at_("x", ones[: num_rows // 10], anyhow[: num_rows // 10]),
            "write all rows": lambda: table.set_at_("x", ones, anyhow),
            "length": lambda: len(table),
            "info": table.info,
            "delete many rows": lambda: table.delete(torch.arange(num_rows // 8) + next(starts)),
            "delete some rows": lambda: table.delete(table.extend(few)),
            "clear": table.clear,
        }
        if isinstance(sampler, tdserve.Prioritized):
            many = torch.arange(0, num_rows, 2)
            calls = {
                "change priorities": lambda: table.update_priority(torch.arange(256), torch.ones(256)),
                "change very many priorities": lambda: table.update_priority(many, torch.ones(len(many))),
                "extend with priorities": lambda: table.extend(
                    row.expand(num_rows).clone(), priority=torch.rand(num_rows)
                ),
                **calls,
            }
        assert long_ones(watched, calls, limit_s) == {}
        assert len(table) == 0


@pytest.mark.parametrize("key", [None, "x"])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_rows_form_trajectories_then_no_call_keeps_it_busy(
    watched: WatchedServer, size: tuple[int, float], key: str | None
) -> None:
    num_rows, limit_s = size
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        row = TensorDict({"x": torch.tensor(0)}, [])
        sampler = tdserve.Slices(slice_len=8, trajectory_key=key)
        table = client.create_replay("r", like=row, capacity=num_rows, sampler=sampler)
        many = num_rows // 10
        rows = TensorDict({"x": torch.arange(many) // 100}, [many])
        ends = None if key else torch.arange(many) % 100 == 99
        everything = TensorDict({"x": torch.arange(num_rows) // 100}, [num_rows])
        each_alone = TensorDict({"x": torch.randperm(many)}, [many])
        for _ in range(11):  # once round, and a little further
            table.extend(rows, ends=ends)
        calls: dict[str, Callable[[], object]] = {
            "extend": lambda: table.extend(rows[:256]),
            "extend by very many rows": lambda: table.extend(rows, ends=ends),
            "extend by all rows at once": lambda: table.extend(everything),
            "extend by very many trajectories": lambda: table.extend(each_alone),
            "sample": lambda: table.sample(256),
            "delete many rows": lambda: table.delete(table.extend(rows, ends=ends)),
            "clear": table.clear,
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_writers_of_long_trajectories_take_turns_then_no_call_keeps_it_busy(
    watched: WatchedServer, size: tuple[int, float], strict: bool
) -> None:
    num_rows, limit_s = size
    many = num_rows // 10
    rows = TensorDict({"x": torch.arange(many) % 64}, [many])
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        sampler = tdserve.Slices(slice_len=1000, trajectory_key="x", strict_length=strict)
        table = client.create_replay("r", like=rows[0], capacity=num_rows, sampler=sampler)
        for _ in range(11):  # once round, and a little further
            table.extend(rows)
        calls: dict[str, Callable[[], object]] = {
            "extend": lambda: table.extend(rows[:256]),
            "extend by very many rows": lambda: table.extend(rows),
            "sample": lambda: table.sample(16_000),
            "sample one slice": lambda: table.sample(1000),
            "delete some rows": lambda: table.delete(table.extend(rows[:256])),
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_slices_are_of_a_new_length_then_it_passes_over_no_table(
    watched: WatchedServer, size: tuple[int, float], strict: bool
) -> None:
    num_rows, limit_s = size
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
        sampler = tdserve.Slices(num_slices=8, strict_length=strict)
        table = client.create_replay("r", like=row, capacity=num_rows, sampler=sampler)
        many = num_rows // 10
        for _ in range(10):
            table.extend(row.expand(many).clone(), ends=torch.arange(many) % 100 == 99)
        lengths = itertools.count(1)
        # More lengths than are kept, none of them twice.
        calls: dict[str, Callable[[], object]] = {
            f"sample {number}": lambda: table.sample(8 * next(lengths)) for number in range(6)
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("size", SIZES)
def test_loop_when_rows_leave_by_rules_of_their_own_then_no_call_keeps_it_busy(
    watched: WatchedServer, size: tuple[int, float]
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
    everything, priorities = row.expand(num_rows).clone(), torch.rand(num_rows, dtype=torch.float64)
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        lowest = client.create_replay("lowest", like=row, capacity=num_rows, remover=tdserve.LowestPriority())
        for _ in range(20):
            lowest.extend(everything[: num_rows // 20], priority=priorities[: num_rows // 20])
        twice = client.create_replay("twice", like=row, capacity=num_rows, max_times_sampled=2)
        queue = client.create_queue("queue", like=row, max_size=num_rows, policy="p")
        client.publish("p", row.expand(1).clone())

        def take() -> None:
            with queue.take(num_rows // 10):
                pass

        def take_and_give_back() -> None:
            with contextlib.suppress(RuntimeError), queue.take(num_rows // 10):
                raise RuntimeError

        def discard() -> None:
            client.publish("p", row.expand(1).clone())
            with pytest.raises(tdserve.DeadlineExceededError):
                queue.take(1, max_lag=0, timeout_s=1.0)

        def fill_another() -> None:
            client.create_replay("another", like=row, capacity=num_rows, max_times_sampled=2).extend(everything)
            client.delete("another")

        def replace_policy() -> None:
            client.publish("p", row.expand(1).clone())
            client.delete("p")
            assert queue.info()["newest_policy_version"] == 0

        calls: dict[str, Callable[[], object]] = {
            "fill a new table": fill_another,
            "evict one row": lambda: lowest.extend(everything[:1]),
            "evict very many rows": lambda: lowest.extend(everything[: num_rows // 3]),
            "evict all rows": lambda: lowest.extend(everything),
            "evict very many rows by priorities": lambda: lowest.extend(
                everything[: num_rows // 3], priority=priorities[: num_rows // 3]
            ),
            "extend by all rows at once": lambda: twice.extend(everything),
            "sample rows that may leave for it": lambda: twice.sample(96_000),
            "fill a queue at once": lambda: queue.extend(everything[: num_rows - len(queue)]),
            "give very many rows back": take_and_give_back,
            "take very many rows": take,
            "have another policy": replace_policy,
            "discard all rows": discard,
        }
        assert long_ones(watched, calls, limit_s) == {}
        assert len(queue) == 0


@pytest.mark.parametrize("size", SIZES)
def test_loop_when_a_sample_is_the_first_of_its_kind_then_it_looks_at_the_rows_a_few_at_a_time(
    watched: WatchedServer, size: tuple[int, float]
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"x": torch.zeros((), dtype=torch.int64)}, [])
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        table = client.create_replay("r", like=row, capacity=num_rows)
        for begin in range(0, num_rows, num_rows // 20):
            numbers = torch.arange(begin, begin + num_rows // 20) // 1000
            table.extend(TensorDict({"x": numbers}, [len(numbers)]))
        count, sizes = itertools.count(1), itertools.count(1)
        calls: dict[str, Callable[[], object]] = {
            "consumer": lambda: table.sample(16, consumer=f"number {next(count)}"),
            "groups": lambda: table.sample(64, group_by="x", group_size=2 ** next(sizes)),  # up to NUM_TRIES sizes
            "very many rows for a consumer": lambda: table.sample(num_rows // 10, consumer=f"number {next(count)}"),
            "very many rows for the same consumer": lambda: table.sample(num_rows // 10, consumer="number 1"),
            "very many groups for a consumer": lambda: table.sample(
                48_000, group_by="x", group_size=64, consumer=f"number {next(count)}"
            ),
            "very many groups": lambda: table.sample(48_000, group_by="x", group_size=64),
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("size", SIZES)
def test_loop_when_very_many_rows_become_too_old_then_they_go_a_few_at_a_time(
    watched: WatchedServer, size: tuple[int, float]
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        table = client.create_replay("r", like=row, capacity=num_rows, policy="p")
        for _ in range(NUM_TRIES):
            client.publish("p", row.expand(1).clone())
            for _ in range(10):
                table.extend(row.expand(num_rows // 10 // NUM_TRIES).clone())
        table.sample(16, max_lag=NUM_TRIES - 1)

        def sample_after_a_publish() -> None:
            client.publish("p", row.expand(1).clone())
            table.extend(row.expand(16).clone())
            assert table.sample(16, max_lag=NUM_TRIES - 1)["policy_version"].min() >= 2

        def replace_policy() -> None:
            client.delete("p")
            client.publish("p", row.expand(1).clone())
            table.extend(row.expand(16).clone())
            table.sample(16, max_lag=0)

        calls: dict[str, Callable[[], object]] = {
            "extend by all rows at once": lambda: table.extend(row.expand(num_rows).clone()),
            "become too old": sample_after_a_publish,
            "are of another policy": replace_policy,
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.parametrize("times", [0, 1], ids=["again", "once"])
@pytest.mark.parametrize("size", SIZES)
def test_loop_when_each_row_is_drawn_once_in_an_epoch_then_very_many_are_drawn_a_few_at_a_time(
    watched: WatchedServer, size: tuple[int, float], times: int
) -> None:
    num_rows, limit_s = size
    row = TensorDict({"x": torch.zeros((), dtype=torch.uint8)}, [])
    with watched.client(transport="gloo", timeout_s=110.0) as client:
        sampler = tdserve.WithoutReplacement()
        table = client.create_replay("r", like=row, capacity=num_rows, sampler=sampler, max_times_sampled=times)
        for _ in range(20):
            table.extend(row.expand(num_rows // 20).clone())
        calls: dict[str, Callable[[], object]] = {
            "sample": lambda: table.sample(256),
            "sample very many rows": lambda: table.sample(num_rows // 20),
        }
        assert long_ones(watched, calls, limit_s) == {}


@pytest.mark.once("gloo")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_loop_when_samples_have_asked_for_consumers_and_groups_then_rows_leave_a_few_at_a_time(
    watched: WatchedServer, transport: str
) -> None:
    num_rows, limit_s = 65_536, 0.006
    rows = TensorDict({"x": torch.arange(num_rows)}, [num_rows])
    with watched.client(transport=transport, timeout_s=110.0) as client:
        table = client.create_replay("r", like=rows[0], capacity=num_rows)
        calls: dict[str, Callable[[], object]] = {
            "delete": lambda: table.delete(torch.arange(num_rows // 2)),
            "clear": table.clear,
        }
        costs = dict.fromkeys(calls, math.inf)
        for _ in range(NUM_TRIES):
            table.extend(rows)
            table.sample(16, group_by="x", group_size=1)
            table.sample(16, consumer="one")
            for name, call in calls.items():
                watched.begin()
                call()
                costs[name] = min(costs[name], watched.worst_s)
        assert {name: round(cost_s * 1e3, 1) for name, cost_s in costs.items() if cost_s > limit_s} == {}
        assert len(table) == 0
