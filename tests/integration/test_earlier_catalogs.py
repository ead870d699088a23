"""Roots whose catalog is older than the records in their stores' folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.server.checking.root_check import check_root
from tdserve.store.roots.record_file import FILE_NAME, KeptRecord
from tests.processes import is_gone, wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"a": torch.zeros((), dtype=torch.int64)}, [])


def make_rows(first: int, end: int) -> TensorDict:
    return TensorDict({"a": torch.arange(first, end)}, [end - first])


def kill(server: tdserve.Server) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid) or None, "the end of the server")


def make_drawn(root: Path, sync_interval_s: float) -> tdserve.Server:
    """Returns a running server with a table from which two ranks have drawn since ``before``, and with versions."""
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.create_replay("table", like=ROW, capacity=5000, max_times_sampled=1).extend(make_rows(0, 90))
        client.create_replay("still", like=ROW, capacity=5000).extend(make_rows(0, 9))
        client.publish("policy", {"w": torch.ones(3)}, keep=5)
    shutil.copytree(root, root.parent / "before")
    server = tdserve.Server(root, sync_interval_s=sync_interval_s).start()
    with server.client() as client:
        for rank in range(2):
            client.replay("table").sample(4, rank=rank, world_size=2, step=0)
        for version in (2.0, 3.0):
            client.publish("policy", {"w": torch.full((3,), version)})
    return server


def draw_again(client: tdserve.Client) -> list[list[int]]:
    table = client.replay("table")
    return [table.sample(4, rank=rank, world_size=2, step=0)["a"].tolist() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("put_back", [("catalog",), ("catalog", "synced")])
def test_catalog_when_of_an_earlier_orderly_end_then_later_stores_are_named_refused_and_brought_back(
    tmp_path: Path, put_back: tuple[str, ...]
) -> None:
    root = tmp_path / "root"
    with make_drawn(root, 0) as server, server.client() as client:
        shares = draw_again(client)
    for name in put_back:
        shutil.rmtree(root / name)
        shutil.copytree(tmp_path / "before" / name, root / name)
    with tdserve.Server(root, sync_interval_s=0.05) as server, server.client() as client:
        for refused in (lambda: client.latest("policy"), lambda: draw_again(client)):
            with pytest.raises(tdserve.CorruptDataError, match="catalog is of an earlier one"):
                refused()
        assert len(client.replay("still")) == 9
    report = check_root(root)
    assert report.num_not_served == report.num_damaged == 2
    named = {each.store: each.reason.split("in its folder: ")[1] for each in report.findings if each.store}
    assert named == {
        "policy": "version 3 instead of 1",
        "table": "rows sampled: 8 instead of 0, 1 draws for ranks",
    }
    report = check_root(root, repairs=True)
    assert [each.store for each in report.findings if each.repaired and each.store] == ["policy", "table"]
    assert (report.num_damaged, check_root(root).findings) == (0, ())
    with tdserve.Server(root) as server, server.client() as client:
        newest = client.latest("policy")
        assert newest is not None
        assert (newest.version, newest.data["w"].tolist()) == (3, [3.0] * 3)
        assert client.publish("policy", newest.data) > 1_000_000
        assert draw_again(client) == shares


@pytest.mark.slow
def test_catalog_when_lost_and_its_copy_is_older_then_the_later_records_in_folders_count(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with make_drawn(root, 0) as server, server.client() as client:
        shares = draw_again(client)
        client.replay("table").extend(make_rows(90, 99))
        client.delete("still")
        client.create_replay("still", like=ROW, capacity=5000).extend(make_rows(100, 120))
        client.create_kv("new").put("k", torch.ones(5000))
    shutil.rmtree(root / "catalog")
    shutil.rmtree(root / "synced")
    shutil.copytree(tmp_path / "before/synced", root / "synced")
    report = check_root(root, repairs=True)
    assert [each.path for each in report.findings if each.losses] == ["catalog/data.mdb"]
    assert [each.path for each in report.findings if not each.repaired] == []
    assert check_root(root).findings == ()
    with tdserve.Server(root) as server, server.client() as client:
        newest = client.latest("policy")
        assert newest is not None
        assert newest.version == 3
        assert draw_again(client) == shares
        assert client.replay("table")[90:99]["a"].tolist() == list(range(90, 99))
        assert client.replay("still")[:20]["a"].tolist() == list(range(100, 120))
        assert client.kv("new")["k"].tolist() == [1.0] * 5000


@pytest.mark.slow
def test_catalog_when_earlier_and_the_server_was_killed_then_stores_are_as_of_its_last_sync(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with make_drawn(root, 0.05) as server, server.client() as client:
        shares = draw_again(client)

        def is_kept() -> bool | None:
            kept = KeptRecord.load(root / "stores/policy")
            return True if kept is not None and json.loads(kept.state)["last_begun"] == 3 else None

        wait_for(is_kept, "a pass over the weights")
        kill(server)
    assert check_root(root).num_not_served == 0  # the catalog went on, and so it is the later one
    shutil.rmtree(root / "catalog")
    shutil.copytree(tmp_path / "before/catalog", root / "catalog")
    report = check_root(root, repairs=True)
    losses = {each.store: each.losses for each in report.findings if each.losses}
    assert sorted(losses) == ["policy", "table"]
    assert all(each[0].endswith("since the last sync") for each in losses.values())
    with tdserve.Server(root) as server, server.client() as client:
        newest = client.latest("policy")
        assert newest is not None
        assert newest.version == 3
        assert draw_again(client) == shares


@pytest.mark.slow
def test_stores_when_killed_after_changes_that_no_sync_has_seen_then_a_repair_takes_nothing_back(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    with make_drawn(root, 0) as server, server.client() as client:
        shares = draw_again(client)
        kill(server)
    records = {path.parent.name: path.read_bytes() for path in root.glob("stores/*/record.json")}
    assert len(records) == 3
    assert all((tmp_path / "before/stores" / name / FILE_NAME).read_bytes() == each for name, each in records.items())
    assert all(json.loads(each)["moment"] for each in records.values())
    assert check_root(root, repairs=True).num_not_served == 0
    with tdserve.Server(root) as server, server.client() as client:
        newest = client.latest("policy")
        assert newest is not None
        assert newest.version == 3
        assert draw_again(client) == shares
