"""Stores survive their server: plain tensordict opens the folders, and a restart restores everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ConnectError, StoreExistsError
from tests.errors import raises
from tests.processes import maps_file, wait_for
from tests.sameness import difference
from tests.tensordict_strategies import Inner

pytestmark = pytest.mark.integration


def frames(num_rows: int) -> TensorDict:
    """Returns leaves that tensordict's own format supports."""
    inner = TensorDict({"x": torch.randn(num_rows, 2, 3)}, [num_rows, 2])
    leaves = {
        "obs": torch.randn(num_rows, 4),
        "half": torch.randn(num_rows).bfloat16(),
        "u": torch.ones(num_rows).to(torch.uint16),
    }
    odd = {"a.b": torch.arange(num_rows), "with space": torch.rand(num_rows) + 1j, "ü": torch.ones(num_rows)}
    return TensorDict({**leaves, "next": inner, "odd": odd}, [num_rows], names=["time"])


def beyond() -> dict[str, Any]:
    """Returns leaves that it drops or cannot read back."""
    tiny, rows = torch.linspace(0, 4, 50).to(torch.float8_e4m3fn), torch.arange(50)
    return {"shape": rows, "device": rows * 2, "_type": rows * 3, "x" * 260: rows * 4, "tiny": tiny}


def plain(server: tdserve.Server, name: str) -> Any:
    """Returns what tensordict itself reads while the server is stopped, without the device that it adds."""
    folder = Path(server.config.root) / "stores" / name / "rows"
    return TensorDict.load_memmap(folder, allow_pickle=False).clone().clear_device_()


@dataclass
class Lives:
    """The answers and files of a server before it was stopped, and a client of the server that came next."""

    client: tdserve.Client
    td: TensorDict
    before: dict[str, Any]
    folders: dict[str, Any]


def fill(client: tdserve.Client, td: TensorDict) -> dict[str, Any]:
    """Creates stores of every kind; returns what clients read from them."""
    client.memmap(td, "frames")[10:20] = td[30:40]
    td[10:20] = td[30:40]
    with_all = td.clone().update({**beyond(), "rec": Inner(z=torch.randn(50), tag="t", batch_size=[50])})
    with_all["next", "shape"] = torch.randn(50, 2)
    client.init_remote(with_all, "beyond")
    client.send(with_all, "beyond")
    replay = client.create_replay("replay", like=td[0], capacity=8, min_size=3)
    replay.extend(td[:5])
    replay.extend(td[5:12])
    for step in range(3):
        client.publish("policy", TensorDict({"w": td["obs"] + step, "v": "text"}, []), metadata={"step": step})
    return {
        "beyond": with_all,
        "rows": replay[:],
        "sampled": replay.sample(32),
        "info": replay.info(),
        "described": {name: client.describe(name) for name in client.stores()},
    }


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Stops a server and starts the next one on the same root."""
    root, td = tmp_path_factory.mktemp("lives"), frames(50)
    with tdserve.Server(root) as server, server.client() as client:
        before = fill(client, td)
    folders = {name: plain(server, name) for name in ("frames", "beyond", "replay")}
    with tdserve.Server(root) as second, second.client() as client:
        yield Lives(client, td, before, folders)


@pytest.mark.slow
def test_folder_when_server_is_stopped_then_tensordict_opens_it(lives: Lives) -> None:
    assert difference(lives.td, lives.folders["frames"]) is None


def test_folder_when_some_leaves_are_beyond_the_format_then_the_others_are_there(lives: Lives) -> None:
    extra = {*beyond(), "next.shape"}
    assert set(lives.before["described"]["beyond"].extra) == extra
    carried = lives.before["beyond"].exclude(*beyond(), ("next", "shape"), "text")
    assert difference(carried.exclude("rec"), lives.folders["beyond"].exclude("rec")) is None
    assert torch.equal(carried["rec"].z, lives.folders["beyond"]["rec"].z)


def test_folder_when_replay_then_holds_every_row_at_its_number(lives: Lives) -> None:
    sampled = lives.before["sampled"]
    assert lives.folders["replay"].batch_size == (8,)
    assert torch.equal(lives.folders["replay"][sampled["index"]]["obs"], sampled["obs"])


def test_restart_when_stores_were_made_then_all_are_described_as_before(lives: Lives) -> None:
    described = {name: lives.client.describe(name) for name in lives.client.stores()}
    now = {name: replace(found, samples=0) for name, found in described.items()}
    assert now == {name: replace(found, samples=0) for name, found in lives.before["described"].items()}


def test_restart_when_a_tensordict_was_stored_then_it_is_back_with_its_version(lives: Lives) -> None:
    assert difference(lives.td, lives.client.from_remote_init("frames")) is None
    assert difference(lives.before["beyond"], lives.client.from_remote_init("beyond")) is None
    version = lives.before["described"]["beyond"].version
    assert lives.client.send(lives.before["beyond"], "beyond") == version + 1


def test_restart_when_a_replay_was_filled_then_rows_indices_and_order_are_back(lives: Lives) -> None:
    replay, sampled = lives.client.replay("replay"), lives.before["sampled"]
    assert len(replay) == 8
    assert difference(lives.before["rows"], replay[:]) is None
    assert difference(sampled.exclude("index", "generation"), replay[sampled["index"]]) is None
    again = replay.sample(64)
    generations = dict(zip(again["index"].tolist(), again["generation"].tolist(), strict=True))
    for index, generation in zip(sampled["index"].tolist(), sampled["generation"].tolist(), strict=True):
        assert generations.get(index, generation) == generation
    # Twelve rows went into eight places: the oldest left is number 4, and is the next to go.
    assert replay.extend(lives.td[20:21]).tolist() == [4]


def test_restart_when_weights_were_published_then_versions_go_on(lives: Lives) -> None:
    found = lives.client.latest("policy")
    assert found is not None
    assert (found.version, found.metadata) == (3, {"step": 2})
    assert torch.equal(found.data["w"], lives.td["obs"] + 2)
    assert found.data["v"] == "text"
    assert [each.version for each in lives.client.describe("policy").versions] == [2, 3]
    assert lives.client.publish("policy", found.data) == 4


def test_delete_when_done_then_the_name_is_free_and_files_are_gone(client: tdserve.Client, name: str) -> None:
    root = Path(client.stats()["root"])
    store = client.memmap(frames(3), name)
    folder = root / client.describe(name).path
    assert store[0].batch_size == ()
    assert folder.is_dir()
    client.delete(name)
    assert name not in client
    assert not folder.exists()
    with raises(tdserve.StoreNotFoundError, name=name):
        store[0]
    other = TensorDict({"y": torch.arange(2)}, [2])
    client.init_remote(other, name)
    assert difference(other, client.from_remote_init(name)) is None
    with pytest.raises(tdserve.SpecMismatchError, match="older store"):
        store[0] = frames(3)[0]


def test_delete_when_done_then_no_worker_keeps_the_space(client: tdserve.Client, name: str) -> None:
    td = frames(3)
    td["text"] = "a value, which the server writes also for a client that writes tensors itself"
    td["large"] = torch.zeros(3, 100_000)  # a store of less than a MiB is freed a little later
    client.memmap(td, name)
    stats = client.stats()
    pids = [worker["pid"] for worker in stats["workers"]]
    inodes = [file.stat().st_ino for file in Path(stats["root"], client.describe(name).path).rglob("*.*")]
    assert any(maps_file(pid, inode) for pid in pids for inode in inodes)
    client.delete(name)
    assert not any(maps_file(pid, inode) for pid in pids for inode in inodes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 60_000])
def test_replay_when_made_again_with_another_structure_then_older_handles_raise(
    client: tdserve.Client, name: str, size: int
) -> None:
    old = client.create_replay(name, TensorDict({"x": torch.zeros(2)}, []), 4)
    batch = TensorDict({"x": torch.zeros(2, 2)}, [2])
    calls: list[Callable[[], object]] = [lambda: old.sample(2), lambda: old[0], lambda: old.extend(batch)]
    old.extend(batch)
    client.delete(name)
    for call in calls:
        with pytest.raises(tdserve.StoreNotFoundError, match=name):
            call()
    new = client.create_replay(name, TensorDict({"x": torch.zeros(size)}, []), 4)
    new.extend(TensorDict({"x": torch.ones(2, size)}, [2]))
    for call in calls:
        with pytest.raises(tdserve.SpecMismatchError, match="older table"):
            call()
    assert new.sample(2)["x"].sum() == 2 * size
    assert old.info()["reserved_rows"] == 0


def test_stores_when_many_then_all_are_listed_in_order(client: tdserve.Client, name: str) -> None:
    names = sorted(f"{name}-{number}"[-100:] for number in range(30))
    for each in names:
        client.memmap_like(TensorDict({"x": torch.zeros(1)}, [1]), each)
    assert [each for each in client.stores() if each in names] == names
    assert client.stores(prefix=names[0][:-1])[:1] == names[:1]
    for each in names:
        client.delete(each)


@pytest.mark.slow
def test_init_remote_when_its_content_finds_no_way_then_the_name_is_free_again(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = TensorDict({"a": torch.zeros(1_000_000)}, [])
    with server.client(transport="gloo") as cut_off, server.client(transport="gloo") as other:
        other.init_remote(td, "before")  # the data worker is up
        monkeypatch.setenv("TDSERVE_INTERFACE", "192.0.2.1")  # an address that no machine has
        with pytest.raises(ConnectError, match="content needs gloo"):
            cut_off.init_remote(td, "cut-off", timeout_s=4.0)
        monkeypatch.delenv("TDSERVE_INTERFACE")
        assert "cut-off" not in other

        def made() -> bool:
            with suppress(StoreExistsError):
                return bool(other.init_remote(td, "cut-off"))
            return False

        wait_for(made, "the end of the failed call's session")
        for name in ("before", "cut-off"):
            other.delete(name)
