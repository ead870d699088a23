"""Roots whose catalog is older than their stores: the stores' folders have what it lacks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.server.checking.root_check import RootReport, check_root
from tdserve.store.roots.record_file import FILE_NAME
from tests.processes import is_gone, wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"b": torch.zeros(4), "a": torch.zeros((), dtype=torch.int64)}, [])
STORES = ("entries", "policy", "queue", "table", "values")


def make_rows(first: int, end: int) -> TensorDict:
    numbers = torch.arange(first, end)
    return TensorDict({"b": numbers[:, None].expand(-1, 4).float().clone(), "a": numbers}, [end - first])


def make_values(num_rows: int) -> TensorDict:
    content = TensorDict({"x": torch.arange(float(num_rows)), "t": "hello"}, [num_rows])
    content["s"] = NonTensorStack(*map(str, range(num_rows)))
    return content


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a store of each kind, and beside it one whose catalog lacks them."""
    with tdserve.Server(tmp_path / "old", sync_interval_s=0) as server, server.client() as client:
        # The keys of the table in another order: this catalog has that order first.
        like = TensorDict({"a": ROW["a"], "b": ROW["b"]}, [])
        client.create_replay("base", like=like, capacity=5000).extend(make_rows(0, 10))
    root = tmp_path / "root"
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.init_remote(make_values(1000), "values", checksum=True)
        client.create_replay("table", like=ROW, capacity=5000).extend(make_rows(0, 90))
        client.create_queue("queue", like=ROW, max_size=5000).extend(make_rows(0, 30))
        with client.queue("queue").take(10):
            pass
        for version in (1.0, 2.0):
            client.publish("policy", {"layer": {"w": torch.full((300, 100), version)}}, metadata={"step": version})
        client.create_kv("entries").put([f"k{i}" for i in range(30)], [torch.full((50,), float(i)) for i in range(30)])
    return root


def take_old_catalog(root: Path) -> None:
    """Gives a root the older catalog, and the one store that it has."""
    old = root.parent / "old"
    for name in ("catalog", "synced"):
        shutil.rmtree(root / name)
        shutil.copytree(old / name, root / name)
    shutil.copytree(old / "stores/base", root / "stores/base")


def kill(server: tdserve.Server) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid) or None, "the end of the server")


def repair(root: Path) -> RootReport:
    """Gives a root the older catalog, and repairs it."""
    take_old_catalog(root)
    assert check_root(root).num_not_served == len(STORES)
    return check_root(root, repairs=True)


@pytest.mark.slow
def test_stores_when_the_catalog_lacks_them_then_a_repair_brings_each_back_whole(root: Path) -> None:
    report = repair(root)
    assert report.num_not_served == 0
    assert [each.path for each in report.findings if "a store again" in each.repaired] == [
        f"stores/{n}" for n in STORES
    ]
    assert check_root(root).findings == ()
    with tdserve.Server(root) as server, server.client() as client:
        assert client.stores() == ["base", *STORES]
        assert (client["values"][:] == make_values(1000)).all()
        assert client["values"][7]["t"] == "hello"
        assert client["values"][7]["s"] == "7"
        assert client.describe("values").checksum
        table = client.replay("table")
        assert table[:90]["a"].tolist() == list(range(90))
        assert table.extend(make_rows(90, 100)).tolist() == list(range(90, 100))
        assert list(table[:1].keys()) == ["b", "a"]
        with client.queue("queue").take(20) as taken:
            assert taken["a"].tolist() == list(range(10, 30))
        newest = client.latest("policy")
        assert newest is not None
        assert (newest.version, newest.data["layer", "w"][0, 0], newest.metadata) == (2, 2.0, {"step": 2.0})
        assert client.publish("policy", newest.data) > 1_000_000
        entries = client.kv("entries")
        assert len(entries) == 30
        assert entries["k7"].tolist() == [7.0] * 50


@pytest.mark.slow
@pytest.mark.parametrize("num_drawn", [4, 20_000])
def test_table_when_brought_back_then_ranks_find_their_draws_or_their_loss_is_named(
    tmp_path: Path, num_drawn: int
) -> None:
    with tdserve.Server(tmp_path / "old", sync_interval_s=0) as server, server.client() as client:
        client.create_replay("base", like=ROW, capacity=5000).extend(make_rows(0, 10))
    root = tmp_path / "root"
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        table = client.create_replay("table", like=ROW, capacity=50_000, max_times_sampled=1)
        table.extend(make_rows(0, 50_000))
        shares = [table.sample(num_drawn, rank=rank, world_size=2, step=0)["a"].tolist() for rank in range(2)]
    take_old_catalog(root)
    (finding,) = [each for each in check_root(root, repairs=True).findings if each.path == "stores/table"]
    is_kept = num_drawn == 4
    assert [loss.split(":")[0] for loss in finding.losses] == ["draws that store 'table' kept for ranks"] * (
        not is_kept
    )
    with tdserve.Server(root) as server, server.client() as client:
        table = client.replay("table")
        if is_kept:
            assert len(table) == 50_000 - 2 * num_drawn
        for rank in range(2):
            found = table.sample(num_drawn, rank=rank, world_size=2, step=0)["a"].tolist()
            assert (found == shares[rank]) == is_kept


@pytest.mark.slow
def test_stores_when_made_anew_since_the_catalog_then_a_repair_takes_their_own_records(tmp_path: Path) -> None:
    root, old, names = tmp_path / "root", tmp_path / "old", ("altered", "packed", "policy", "renewed", "table")
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        for name in ("altered", "table"):
            client.create_replay(name, like=ROW, capacity=5000).extend(make_rows(0, 90))
        client.publish("policy", {"w": torch.zeros(3000)})
        client.init_remote(TensorDict({"y": torch.ones(3)}, [3]), "packed")
        client.init_remote(make_values(1000), "renewed")
    shutil.copytree(root, old)
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.replay("altered").add_leaves(like=ROW.clone().set("z", torch.tensor(0.0)))
        for name in names[1:]:
            client.delete(name)
        client.publish("policy", {"v": torch.ones(2000)})
        client.create_queue("table", like=ROW, max_size=300).extend(make_rows(0, 30))
        for name in ("packed", "renewed"):
            client.init_remote(TensorDict({"w": torch.rand(7000, 3)}, [7000]), name)
        renewed = client["renewed"][:]
    for name in ("catalog", "synced"):
        shutil.rmtree(root / name)
        shutil.copytree(old / name, root / name)
    found = check_root(root)
    assert [each.path for each in found.findings if each.is_not_served] == [f"stores/{name}" for name in names]
    report = check_root(root, repairs=True)
    assert [each.store for each in report.findings if each.repaired and not each.losses] == list(names)
    assert (report.num_damaged, check_root(root).findings) == (0, ())
    with tdserve.Server(root) as server, server.client() as client:
        assert (client["renewed"][:] == renewed).all()
        assert len(client["packed"]) == 7000
        assert client.replay("altered")[:90]["z"].tolist() == [0.0] * 90
        assert len(client.queue("table")) == 30
        newest = client.latest("policy")
        assert newest is not None
        assert newest.data["v"].tolist() == [1.0] * 2000


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["all", "damaged", "empty"])
def test_catalog_when_lost_with_its_copy_then_a_repair_makes_one_of_the_records_in_folders(
    root: Path, lost: str
) -> None:
    if lost == "all":
        shutil.rmtree(root / "catalog")
        shutil.rmtree(root / "synced")
    else:
        for path in (root / "catalog/data.mdb", root / "synced/catalog.mdb"):
            path.write_bytes(b"x" * 9999 if lost == "damaged" else b"")
    shutil.copytree(root / "stores/table", root / "stores/nameless")
    (root / "stores/nameless" / FILE_NAME).unlink()
    assert check_root(root).num_damaged > 0
    assert list(root.glob("stores/.*")) == []
    report = check_root(root, repairs=True)
    (made,) = [each for each in report.findings if each.losses]
    assert made.path == "catalog/data.mdb"
    assert made.repaired
    assert made.losses[0].startswith("stores without a folder of their own")
    (left,) = [each for each in report.findings if not each.repaired]
    assert left.path.startswith("stores/.lost-nameless")
    assert len(check_root(root).findings) == 1
    with tdserve.Server(root) as server, server.client() as client:
        assert client.stores() == list(STORES)
        assert (client["values"][:] == make_values(1000)).all()
        assert client.replay("table")[:90]["a"].tolist() == list(range(90))
        assert len(client.kv("entries")) == 30


@pytest.mark.slow
def test_stores_when_their_folders_are_swapped_then_named_and_no_file_is_touched(root: Path) -> None:
    values, table, away = root / "stores/values", root / "stores/table", root / "away"
    for source, target in ((values, away), (table, values), (away, table)):
        source.rename(target)
    report = check_root(root, repairs=True)
    assert [each.reason for each in report.findings] == [
        f"it is the folder of store {n!r}" for n in ("values", "table")
    ]
    assert report.num_not_served == 2
    for source, target in ((values, away), (table, values), (away, table)):
        source.rename(target)
    assert check_root(root).findings == ()


@pytest.mark.slow
def test_stores_when_their_folders_have_an_earlier_structure_then_refused_at_once_and_no_file_is_made(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.create_replay("table", like=ROW, capacity=5000).extend(make_rows(0, 90))
        client.init_remote(make_values(1000), "values")
    shutil.copytree(root / "stores", tmp_path / "stores")
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.replay("table").add_leaves(like=ROW.clone().set("z", torch.tensor(0.0)))
        client["values"]["new"] = torch.ones(1000)
    shutil.rmtree(root / "stores")
    shutil.copytree(tmp_path / "stores", root / "stores")
    files = {path: path.read_bytes() for path in root.glob("stores/**/*") if path.is_file()}
    report = check_root(root, repairs=True)
    assert [(each.store, each.repaired, each.is_not_served) for each in report.findings] == [
        ("table", "", True),
        ("values", "", True),
    ]
    assert all("structure 0 instead of 1" in each.reason and "checkpoint" in each.remedy for each in report.findings)
    assert {path: path.read_bytes() for path in root.glob("stores/**/*") if path.is_file()} == files
    with tdserve.Server(root) as server, server.client(timeout_s=600) as client:  # a call that waited would take long
        with pytest.raises(tdserve.CorruptDataError, match="expected structure 1"):
            client.replay("table").sample(1)
        with pytest.raises(tdserve.CorruptDataError, match="expected structure 1"):
            client["values"][3]
        for name in ("table", "values"):
            client.delete(name)
        assert client.stores() == []


@pytest.mark.slow
def test_store_when_only_its_folder_is_older_then_its_own_record_counts_and_the_loss_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.init_remote(make_values(1000), "values")
    shutil.copytree(root / "stores/values", tmp_path / "values")
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.delete("values")
        client.init_remote(make_values(2000), "values")
    shutil.rmtree(root / "stores/values")
    shutil.copytree(tmp_path / "values", root / "stores/values")
    (finding,) = check_root(root, repairs=True).findings
    assert finding.repaired
    assert [loss.split(" 'values'")[0] for loss in finding.losses] == ["the content of the later store"]
    assert check_root(root).findings == ()
    with tdserve.Server(root) as server, server.client() as client:
        assert (client["values"][:] == make_values(1000)).all()


@pytest.mark.slow
def test_stores_when_the_server_was_killed_too_then_a_repair_names_what_it_has_lost(root: Path) -> None:
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        client.replay("table").extend(make_rows(90, 95))
        kill(server)
    report = repair(root)
    assert report.num_damaged == len(STORES)
    assert report.num_not_served == 0
    assert all("changed settings of store" in each.losses[0] for each in report.findings if each.repaired)
    with tdserve.Server(root) as server, server.client() as client:
        assert client.replay("table")[:95]["a"].tolist() == list(range(95))


@pytest.mark.slow
def test_store_when_its_record_is_damaged_or_of_another_then_set_aside(root: Path) -> None:
    (root / "stores/values" / FILE_NAME).write_bytes((root / "stores/table" / FILE_NAME).read_bytes())
    (root / "stores/queue" / FILE_NAME).write_bytes(b"{}")
    report = repair(root)
    assert report.num_not_served == 2
    assert [each.path.split("-")[1] for each in report.findings if each.is_not_served and not each.repaired] == [
        "queue",
        "values",
    ]


@pytest.mark.slow
def test_record_when_damaged_then_a_check_finds_it_and_a_pass_makes_it_anew(root: Path) -> None:
    path = root / "stores/table" / FILE_NAME
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    (found,) = check_root(root, repairs=True).findings
    assert (found.path, found.store, found.repaired) == (f"stores/table/{FILE_NAME}", "table", "it was removed")
    with tdserve.Server(root, sync_interval_s=0) as server, server.client() as client:
        client.replay("table").sample(1)
    assert path.exists()
