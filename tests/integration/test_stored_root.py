"""A root folder from the time when its format was new: a server can serve all of it and write to it.

It lies in ``tests/stored_root``, and is made anew when the format changes: see ``make.py`` there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.sameness import difference
from tests.stored_root import stored
from tests.stored_root.unpacking import unpack_root

pytestmark = pytest.mark.integration

NUM_LEFT = 3
"""Rows of the queue that were not taken."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server of such a copy. No test of this module changes a store, except the last, which has a server of its
    own."""
    with tdserve.Server(unpack_root(tmp_path_factory.mktemp("stored")), port=0) as started:
        yield started


@pytest.fixture(params=["gloo", "shm"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client over each transport."""
    with server.client(transport=request.param, timeout_s=20.0) as connected:
        yield connected


def live_rows(replay: Any) -> Any:
    """Returns all rows of a replay table, the updated ones first, without columns that the service adds."""
    found = replay[:]
    return found[found["n", "i"].argsort()]


def check_rows(found: Any, first: int, last: int) -> None:
    """Checks rows with consecutive numbers and their texts."""
    expected = stored.rows(first, last)
    assert torch.equal(found["x"], expected["x"])
    assert torch.equal(found["n", "i"], expected["n", "i"])
    assert list(found["t"]) == [f"text {number}" for number in range(first, last)]


@pytest.mark.slow
def test_root_when_stored_then_all_stores_are_listed_and_described(client: tdserve.Client) -> None:
    found = {name: client.describe(name).kind for name in client.stores()}
    kinds = {"entries": "keyed", "no rows": "tensordict", "policy": "weights", "queue": "replay", "replay": "replay"}
    assert found == {**kinds, "small": "tensordict", "tensordict": "tensordict"}
    described = {name: client.describe(name) for name in client.stores()}
    assert described["tensordict"].version == 2
    assert set(described["tensordict"].extra) == {"shape", "small"}
    assert not any(each.read_only or each.adopted for each in described.values())
    assert [each.metadata for each in described["policy"].versions] == [{"step": 1}, {"step": 2}]


def test_tensordict_when_stored_then_comes_back_as_it_went_in(client: tdserve.Client) -> None:
    assert difference(stored.tensordict(16.0), client.load_memmap("tensordict")) is None
    some = client["tensordict"][1:3]
    assert torch.equal(some["small"].float(), stored.tensordict(16.0)["small"].float()[1:3])
    assert [text.tolist() for text in some["tokens"]] == [text.tolist() for text in list(stored.ragged(16.0))[1:3]]
    assert difference(TensorDict({"scalar": torch.tensor(2.5), "t": "x"}, []), client.load_memmap("no rows")) is None


def test_entries_when_stored_then_are_there(client: tdserve.Client) -> None:
    entries = client.kv("entries")
    assert sorted(entries.keys()) == sorted(stored.ENTRIES)
    assert difference(stored.row(2), entries["second"]) is None
    assert difference(stored.small(), client.load_memmap("small")) is None


def test_weights_when_stored_then_both_versions_are_there(client: tdserve.Client) -> None:
    newest = client.latest("policy")
    assert newest is not None
    assert (newest.version, newest.metadata) == (2, {"step": 2})
    assert difference(stored.weights(2), newest.data) is None
    assert difference(stored.weights(1), client.version("policy", 1).data) is None


def test_replay_when_stored_then_rows_settings_and_priorities_are_kept(client: tdserve.Client) -> None:
    replay = client.replay("replay", timeout_s=0)
    assert len(replay) == stored.CAPACITY
    check_rows(live_rows(replay), stored.NUM_INSERTED - stored.CAPACITY, stored.NUM_INSERTED)
    info = replay.info()
    assert (info["inserts"], info["samples"]) == (stored.NUM_INSERTED, 2)
    settings = json.loads(client.describe("replay").settings)
    assert settings["sampler"] == {"kind": "prioritized", "alpha": 1.0, "beta": 0.4, "eps": 1e-8}
    assert settings["limiter"]["kind"] == "sample_to_insert_ratio"
    assert settings["policy"] == "policy"


def test_queue_when_stored_then_rows_that_were_not_taken_wait(client: tdserve.Client) -> None:
    queue = client.queue("queue", timeout_s=0)
    with pytest.raises(InterruptedError):
        _look(queue)  # they are given back


def _look(queue: Any) -> None:
    with queue.take(NUM_LEFT, timeout_s=20.0) as rows:
        check_rows(rows, 1, 1 + NUM_LEFT)
        raise InterruptedError


def test_folder_when_stored_then_opens_with_plain_tensordict(server: tdserve.Server) -> None:
    found = TensorDict.load_memmap(Path(server.config.root, "stores/tensordict/rows"), allow_pickle=False)
    assert torch.equal(found["obs"], stored.tensordict(16.0)["obs"])


@pytest.mark.slow
@pytest.mark.once("shm")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_root_when_written_then_everything_goes_on_also_after_a_restart(tmp_path: Path, transport: Any) -> None:
    root = unpack_root(tmp_path / "root")
    with tdserve.Server(root, port=0) as server, server.client(transport=transport, timeout_s=20.0) as client:
        replay = client.replay("replay")
        others = torch.tensor([row for row in range(stored.CAPACITY) if row not in stored.PRIORITIES])
        replay.update_priority(others, torch.full((len(others),), 1e-9))  # hardly ever drawn: what counts is
        priorities = {int(i): float(p) for i, p in _drawn(replay)}
        for number, priority in stored.PRIORITIES.items():
            assert priorities[number] == priority
        assert client.send(stored.tensordict(32.0), "tensordict") == 3
        replay.extend(stored.rows(stored.NUM_INSERTED, stored.NUM_INSERTED + 2))
        assert client.publish("policy", stored.weights(3)) == 3
        with client.queue("queue").take(1) as rows:
            check_rows(rows, 1, 2)
        client.queue("queue").extend(stored.rows(4, 5))
        client.delete("no rows")
        client.init_remote(stored.tensordict(), "new")
    with tdserve.Server(root, port=0) as server, server.client(transport=transport, timeout_s=20.0) as client:
        assert client.stores() == ["entries", "new", "policy", "queue", "replay", "small", "tensordict"]
        assert difference(stored.tensordict(32.0), client.load_memmap("tensordict")) is None
        assert difference(stored.weights(3), client.version("policy", 3).data) is None
        last = stored.NUM_INSERTED + 2
        check_rows(live_rows(client.replay("replay")), last - stored.CAPACITY, last)
        with client.queue("queue").take(3) as rows:
            check_rows(rows, 2, 5)


def _drawn(replay: Any) -> list[tuple[int, float]]:
    """Returns row number and priority of every row that is drawn in many tries."""
    batch = replay.sample(64)
    return list(zip(batch["index"].tolist(), batch["priority"].tolist(), strict=True))
