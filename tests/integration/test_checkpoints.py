"""Checkpoints of a server that is in use, and what comes back from them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    StoreExistsError,
    StoreMovedError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.client.moves.checkpoint_writer import CheckpointProgress
from tests.integration.crashing import Crashing
from tests.processes import wait_for
from tests.rough_proxy import run_rough_proxy

pytestmark = pytest.mark.integration

ROW = TensorDict({"number": torch.tensor(0), "body": torch.zeros(300)}, [])


def make_rows(first: int, num_rows: int) -> TensorDict:
    number = torch.arange(first, first + num_rows)
    return TensorDict({"number": number, "body": number[:, None].expand(-1, 300).float()}, [num_rows])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server of its own."""
    with tdserve.Server(tmp_path / "root").start() as made:
        yield made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tdserve.Server]:
    """An empty one."""
    with tdserve.Server(tmp_path / "other").start() as made:
        yield made


@pytest.fixture(params=["shm", "gloo"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client(transport=request.param) as made:
        yield made


def fill(client: tdserve.Client) -> None:
    """Makes a store of each kind."""
    table = client.create_replay("table", ROW, 100, sampler=tdserve.Prioritized())
    table.extend(make_rows(0, 90), priority=torch.arange(90.0) + 1)
    table.extend(make_rows(90, 20))
    queue = client.create_queue("queue", ROW, max_size=50)
    queue.extend(make_rows(0, 10))
    with queue.take(4):
        pass
    values = client.create_kv("values")
    values.put(["a", "b"], [TensorDict({"x": torch.ones(3)}, []), {"text": "b"}])
    for step in range(3):
        client.publish("policy", TensorDict({"w": torch.full((500,), float(step))}, []), metadata={"step": step})
    followers = client.create_replay("followers", ROW, 10, policy="policy")
    followers.extend(make_rows(0, 3))
    client.memmap(TensorDict({"x": torch.arange(4), "s": NonTensorStack("a", "b", "c", "d")}, [4]), "content")
    client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "never-used")


def check_filled(client: tdserve.Client, prefix: str = "") -> None:
    """Checks that these stores have what they had, and can be used."""
    table = client.replay(f"{prefix}table")
    rows = table[:]
    assert sorted(rows["number"].tolist()) == list(range(10, 110))
    assert torch.equal(rows["body"][:, 7], rows["number"].float())
    index = torch.arange(20, 90)
    assert table.get_priorities(index).tolist() == (index + 1.0).tolist()
    assert table.extend(make_rows(110, 1)).tolist() == [10]  # after the row that was written last
    assert set(table.sample(50)["number"].tolist()) <= set(range(11, 111))
    queue = client.queue(f"{prefix}queue")
    with queue.take(6) as taken:
        assert taken["number"].tolist() == [4, 5, 6, 7, 8, 9]
    values = client.kv(f"{prefix}values")
    assert values["a"]["x"].tolist() == [1.0] * 3
    assert values["b"] == {"text": "b"}
    weights = client.latest(f"{prefix}policy")
    assert weights is not None
    assert (weights.version, weights.metadata) == (3, {"step": 2})
    assert weights.data["w"].tolist() == [2.0] * 500
    assert client.publish(f"{prefix}policy", TensorDict({"w": torch.zeros(500)}, [])) > 3
    followers = client.replay(f"{prefix}followers")
    assert followers.info()["policy"] == f"{prefix}policy"
    assert followers.sample(3)["policy_version"].tolist() == [3] * 3
    content = client[f"{prefix}content"].to_tensordict()
    assert content["x"].tolist() == [0, 1, 2, 3]
    assert list(content["s"]) == ["a", "b", "c", "d"]
    assert client[f"{prefix}never-used"]["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_stores_when_restored_then_of_all_kinds_as_they_were_and_also_after_a_restart(
    client: tdserve.Client, other: tdserve.Server, tmp_path: Path
) -> None:
    fill(client)
    made = client.checkpoint(tmp_path / "place")
    assert made.left_out == []
    assert len(made.stores) == 7
    client.replay("table").extend(make_rows(500, 50))
    with other.client(transport=client.transport) as restored:
        assert len(restored.restore(tmp_path / "place")) == 7
    other.shutdown()
    other.start()
    with other.client(transport=client.transport) as restored:
        check_filled(restored)


@pytest.mark.slow
def test_stores_when_restored_beside_the_originals_then_both_go_on(client: tdserve.Client, tmp_path: Path) -> None:
    fill(client)
    client.checkpoint(tmp_path / "place")
    assert client.restore(tmp_path / "place", prefix="old/".replace("/", "-")) == sorted(
        f"old-{name}" for name in ("table", "queue", "values", "policy", "followers", "content", "never-used")
    )
    check_filled(client, "old-")
    check_filled(client)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_place_when_it_is_a_url_then_the_same(server: tdserve.Server, tmp_path: Path, scheme: str) -> None:
    with server.client() as client:
        fill(client)
        place = f"{scheme}://{tmp_path}/place"
        client.checkpoint(place)
        (made,) = tdserve.list_checkpoints(place)
        client.restore(place, prefix="old-", checkpoint=made.id)
        check_filled(client, "old-")


@pytest.mark.slow
def test_names_when_given_then_these_alone_and_nothing_if_one_is_taken_or_missing(
    server: tdserve.Server, tmp_path: Path
) -> None:
    with server.client() as client:
        fill(client)
        client.checkpoint(tmp_path / "place")
        client.delete("table")
        with pytest.raises(StoreNotFoundError, match=r"'missing' in checkpoint .*; it has .*'queue'"):
            client.restore(tmp_path / "place", names=["table", "missing"])
        with pytest.raises(StoreExistsError, match=r"queue.* prefix="):
            client.restore(tmp_path / "place", names=["table", "queue"])
        assert "table" not in client
        assert client.restore(tmp_path / "place", names=["table"]) == ["table"]
        assert len(client.replay("table")) == 100
        with pytest.raises(InvalidRequestError, match="no checkpoint"):
            client.restore(tmp_path / "nowhere")
        with pytest.raises(InvalidRequestError, match="cannot be written"):
            client.checkpoint("/dev/null/place")
        with pytest.raises(InvalidRequestError):
            client.checkpoint(tmp_path / "place", keep=0)


@pytest.mark.slow
def test_checkpoint_when_it_is_not_the_first_then_only_what_has_changed_is_written(
    server: tdserve.Server, tmp_path: Path
) -> None:
    wide = TensorDict({"x": torch.zeros(1 << 16, dtype=torch.uint8)}, [])
    with server.client() as client:
        table = client.create_replay("table", wide, 320)
        rows = TensorDict({"x": torch.randint(256, (320, 1 << 16), dtype=torch.uint8)}, [320])
        table.extend(rows)
        first = client.checkpoint(tmp_path / "place")
        assert first.written_nbytes >= rows["x"].nbytes
        table.extend(rows[1:2])
        second = client.checkpoint(tmp_path / "place")
        assert (1 << 16) <= second.written_nbytes <= 2 << 20
    with server.client() as client:  # of another session
        assert client.checkpoint(tmp_path / "place").written_nbytes <= 1 << 20
        third = client.checkpoint(tmp_path / "place", keep=1)
    assert [each.id for each in tdserve.list_checkpoints(tmp_path / "place")] == [third.id]
    assert sum(path.stat().st_size for path in tmp_path.glob("place/blocks/*/*")) <= rows["x"].nbytes + (2 << 20)


@pytest.mark.slow
@pytest.mark.once("gloo")
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_moment_when_writers_go_on_then_one_of_all_stores(
    server: tdserve.Server, other: tdserve.Server, tmp_path: Path, transport: str
) -> None:
    """A writer writes each number to one table, then to another, then to a keyed store, and then over a store. So at
    each moment one of these is at most one number ahead of the next."""
    is_over, has_begun = Event(), Event()

    def write() -> None:
        with server.client(transport=transport) as writing:
            tables = [writing.create_replay(f"table-{each}", ROW, 100_000) for each in range(2)]
            values, slot = writing.create_kv("values"), writing.memmap(make_rows(0, 1), "slot")
            number = 0
            while not is_over.is_set():
                for table in tables:
                    table.extend(make_rows(number, 2))
                values.put("n", {"n": number})
                slot[:] = make_rows(number, 1)
                number += 2
                has_begun.set()

    thread = Thread(target=write)
    thread.start()
    try:
        assert has_begun.wait(30.0)
        with server.client(transport=transport) as client:
            for _ in range(3):
                client.checkpoint(tmp_path / "place")
    finally:
        is_over.set()
        thread.join()
    for made in tdserve.list_checkpoints(tmp_path / "place"):
        with other.client() as restored:
            restored.restore(tmp_path / "place", checkpoint=made.id)
            first, second = (restored.replay(f"table-{each}")[:]["number"].tolist() for each in range(2))
            value, slot = restored.kv("values")["n"]["n"], int(restored["slot"]["number"][0])
            counts = [len(first) // 2, len(second) // 2, value // 2 + 1, slot // 2 + 1]
            assert first == list(range(len(first)))
            assert second == list(range(len(second)))
            assert counts == sorted(counts, reverse=True)
            assert counts[0] - counts[-1] <= 1
            for name in restored.stores():
                restored.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_calls_when_a_checkpoint_is_made_then_wait_for_its_moment(
    server: tdserve.Server, tmp_path: Path, transport: str
) -> None:
    is_over, failures = Event(), list[BaseException]()

    def call(look: Callable[[tdserve.Client], object]) -> None:
        with server.client(transport=transport) as calling:
            while not is_over.is_set():
                try:
                    look(calling)
                except tdserve.TDServeError as error:
                    failures.append(error)

    with server.client(transport=transport) as client:
        fill(client)
        looks: list[Callable[[tdserve.Client], object]] = [
            lambda calling: calling["queue"],
            lambda calling: calling.kv("values")["a"],
            lambda calling: "table" in calling,
            lambda calling: calling.replay("table").extend(make_rows(0, 1)),
        ]
        threads = [Thread(target=call, args=(look,)) for look in looks]
        for thread in threads:
            thread.start()
        for _ in range(6):
            client.checkpoint(tmp_path / "place")
        is_over.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.slow
def test_checkpoint_when_a_write_lasts_long_then_is_made_after_it_and_the_stores_serve_meanwhile(
    server: tdserve.Server, tmp_path: Path
) -> None:
    with (
        run_rough_proxy(server.address) as proxy,
        server.client() as client,
        tdserve.connect(proxy.address, transport="grpc", timeout_s=60.0) as slow,
        ThreadPoolExecutor(2) as threads,
    ):
        client.create_replay("table", ROW, 20_000)
        other = client.create_replay("other", ROW, 20_000)
        writing = slow.replay("table")
        writing.extend(make_rows(0, 1))
        before = proxy.num_bytes_there
        proxy.there.bytes_per_s = 4 << 20
        write = threads.submit(writing.extend, make_rows(1, 10_000))
        wait_for(lambda: proxy.num_bytes_there > before + (1 << 20), "the beginning of the write")
        proxy.there.is_stopped = True
        with pytest.raises(DeadlineExceededError, match="'table'"):
            client.checkpoint(tmp_path / "place", timeout_s=3.0)
        assert tdserve.list_checkpoints(tmp_path / "place") == []
        checkpoint = threads.submit(client.checkpoint, tmp_path / "place")
        wait_for(lambda: rests(other), "the rest of all stores")
        other.extend(make_rows(0, 1))
        proxy.mend()
        write.result(60.0)
        made = checkpoint.result(60.0)
        assert [store.name for store in made.stores] == ["other", "table"]
        assert made.paused_s < 2.0
    assert [each.id for each in tdserve.list_checkpoints(tmp_path / "place")] == [made.id]


def rests(table: tdserve.ReplayHandle) -> bool:
    """Returns whether a table takes no rows just now."""
    try:
        table.extend(make_rows(0, 1), timeout_s=0)
    except StoreMovedError:
        return True
    except DeadlineExceededError:  # the machine is busy
        return False
    return False


@pytest.mark.slow
def test_place_when_the_server_is_killed_in_the_middle_then_has_what_it_had(tmp_path: Path) -> None:
    with Crashing(tmp_path / "root") as crashing, tdserve.connect(crashing.server.address) as client:
        fill(client)
        first = client.checkpoint(tmp_path / "place")
        client.replay("table").extend(make_rows(1000, 50))

        def kill(progress: CheckpointProgress) -> None:
            if crashing.server.is_alive:
                os.kill(crashing.server.pid, signal.SIGKILL)

        with pytest.raises(TDServeError):
            client.checkpoint(tmp_path / "place", on_progress=kill, timeout_s=2.0)
        assert [each.id for each in tdserve.list_checkpoints(tmp_path / "place")] == [first.id]
        crashing.start()
        assert not any((tmp_path / "root").glob("checkpoints/*"))
        client.checkpoint(tmp_path / "place")
        client.restore(tmp_path / "place", names=["table"], prefix="new-")
        assert 1049 in client.replay("new-table")[:]["number"].tolist()
        client.restore(tmp_path / "place", checkpoint=first.id, prefix="old-")
        check_filled(client, "old-")


@pytest.mark.slow
def test_restore_when_a_block_is_damaged_then_refused_and_the_store_is_not_there(
    server: tdserve.Server, other: tdserve.Server, tmp_path: Path
) -> None:
    with server.client() as client, other.client() as restored:
        client.memmap(TensorDict({"x": torch.arange(4)}, [4]), "a-small-one")
        client.memmap(TensorDict({"x": torch.arange(400_000)}, [400_000]), "big")
        client.checkpoint(tmp_path / "place")
        path = max(tmp_path.glob("place/blocks/*/*"), key=lambda each: each.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=path.name):
            restored.restore(tmp_path / "place")
        assert restored.stores() == []
        path.unlink()
        with pytest.raises(CorruptDataError, match=path.name):
            restored.restore(tmp_path / "place")
    other.shutdown()
    other.start()
    assert not any((tmp_path / "other/arriving").iterdir())


@pytest.mark.slow
def test_session_when_it_ends_then_nothing_is_kept_for_its_checkpoint(server: tdserve.Server, tmp_path: Path) -> None:
    with server.client() as client:
        client.create_replay("table", ROW, 100).extend(make_rows(0, 90))

        def interrupt(progress: CheckpointProgress) -> None:
            if any((tmp_path / "root").glob("checkpoints/*/*")):
                raise KeyboardInterrupt

        client.replay("table").extend(make_rows(0, 1))
        client.create_kv("values").put("a", {"n": 1})  # values are kept apart
        with pytest.raises(KeyboardInterrupt):
            client.checkpoint(tmp_path / "place", on_progress=interrupt)
    wait_for(lambda: not any((tmp_path / "root").glob("checkpoints/*")), "the end of what was kept")
    assert tdserve.list_checkpoints(tmp_path / "place") == []


def test_place_when_in_the_root_of_the_server_then_refused_and_nothing_is_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with tdserve.Server(root).start() as server, server.client() as client:
        client.init_remote(TensorDict({"x": torch.zeros(3)}, []), "store")
        for place in (root, root / "below"):
            with pytest.raises(tdserve.InvalidRequestError, match=f"{place} is in {root}, the root of a server"):
                client.checkpoint(place)
        assert not (root / "below").exists()
    with pytest.raises(tdserve.TDServeError, match="the root of a server"):
        tdserve.Server(root, checkpoint_every_s=60, checkpoint_to=str(root / "below")).start()
