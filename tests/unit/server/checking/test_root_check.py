"""Damage of every file of a root that a server has left in order. tests/stored_root describes the root."""

from __future__ import annotations

import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import lmdb
import pytest

from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    NotSupportedError,
    RootInUseError,
    WrongStateError,
)
from tdserve.base.machine import read_boot_id
from tdserve.server.checking.root_check import RootReport, check_root
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.roots.file_sums import record_sums
from tdserve.store.roots.root import Root
from tests.roots import make_quick_root
from tests.stored_root.make import TARGET
from tests.stored_root.unpacking import unpack_root

NOT_COMPARED = ("used.memmap",)
"""Marks of use, which are only hints."""

UNUSED_ROWS = {"stores/queue/rows/x.memmap": 8, "stores/queue/rows/n/i.memmap": 8}
"""Files of a queue with rows 1 to 3, and the bytes of a row in them: the others have no content."""

MARKS = "of each row may be wrong"


def list_files() -> list[str]:
    """Returns the files of the stored root that have content."""
    with tarfile.open(TARGET) as archive:
        return sorted(
            each.name for each in archive if each.isfile() and each.size and Path(each.name).name not in NOT_COMPARED
        )


@pytest.fixture
def root() -> Iterator[Path]:
    """A copy of the stored root."""
    with make_quick_root() as folder:
        yield unpack_root(folder / "root")


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def name_faults(report: RootReport) -> list[str]:
    return [each.path for each in report.findings if each.is_damage and not each.repaired]


def test_root_when_whole_then_nothing_is_found_and_nothing_changes(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "tdserve.lock"}
    seen = []
    report = check_root(root, on_progress=lambda progress: seen.append(progress.num_checked))
    assert (report.findings, report.is_orderly) == ((), True)
    assert report.progress.nbytes > sum(path.stat().st_size for path in root.rglob("x.memmap"))
    assert report.progress.num_stores == report.progress.num_checked == seen[-1] == 7
    assert {path: path.read_bytes() for path in before} == before


def list_groups() -> list[list[str]]:
    """Returns files that can be damaged together, since each is looked at by itself: one of each store, or of the
    root."""
    of_store: dict[str, list[str]] = {}
    for name in list_files():
        of_store.setdefault("/".join(name.split("/")[:2]) if name.startswith("stores/") else name, []).append(name)
    of_stores = [names for key, names in of_store.items() if key.startswith("stores/")]
    single = [names for key, names in of_store.items() if not key.startswith("stores/")]
    together = [[name for name in names if name] for names in zip_longest(*of_stores, fillvalue="")]
    return [*single, *together]


def find_unnoticed(root: Path, names: list[str], damage: Callable[[str], None]) -> list[str]:
    """Returns the files whose damage was not reported. A report about a store covers all its files."""
    for name in names:
        damage(name)
    faults = name_faults(check_root(root))
    return [name for name in names if not any(name.startswith(fault) for fault in faults)]


@pytest.mark.slow
@pytest.mark.parametrize("names", list_groups(), ids=lambda names: names[0])
def test_files_when_a_bit_is_flipped_in_each_then_all_are_found(root: Path, names: list[str]) -> None:
    def damage(name: str) -> None:
        nbytes, choice = (root / name).stat().st_size, random.Random(name)
        first = UNUSED_ROWS.get(name, 0)
        flip(root / name, choice.randrange(first, 4 * first or nbytes), choice.randrange(8))

    assert find_unnoticed(root, names, damage) == []


@pytest.mark.slow
@pytest.mark.parametrize("names", list_groups(), ids=lambda names: names[0])
def test_files_when_cut_then_all_are_found(root: Path, names: list[str]) -> None:
    def damage(name: str) -> None:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])

    assert find_unnoticed(root, names, damage) == []


def remove(path: Path) -> None:
    path.unlink()


def swap_halves(path: Path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[half:] + content[:half])


REPAIRED: dict[str, Callable[[Path], object]] = {
    "catalog/data.mdb": remove,
    "catalog/data.mdb whole": lambda path: flip(path, path.stat().st_size - 1),
    "run.json": lambda path: flip(path, 20),
    "tdserve.json": lambda path: flip(path, -3),
    "synced/catalog.mdb": swap_halves,
    "synced/sums.json": remove,
    "stores/policy/versions/2.safetensors": lambda path: flip(path, -1),
    "stores/policy/versions/synced.json": lambda path: flip(path, 9),
    "stores/replay/rows/x.memmap": lambda path: flip(path, 17),
    "stores/replay/rows/n/meta.json": remove,
    "stores/replay/generation.memmap": swap_halves,
    "stores/replay/synced.memmap": swap_halves,
    "stores/replay/synced-values/data.mdb": swap_halves,
    "stores/tensordict/rows/obs.memmap": remove,
    "stores/tensordict/rows/next/done.memmap": lambda path: path.write_bytes(b"\1"),
}
"""Damage after which a repair makes the root whole."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REPAIRED)
def test_damage_when_repaired_then_the_root_is_whole(root: Path, name: str) -> None:
    REPAIRED[name](root / name.partition(" ")[0])
    report = check_root(root, repairs=True)
    assert name_faults(report) == []
    assert all(each.repaired for each in report.findings)
    again = check_root(root)
    assert again.findings == ()
    assert again.progress.num_stores == 7


def test_rows_when_damaged_then_reported_by_store_and_number(root: Path) -> None:
    flip(root / "stores/replay/rows/x.memmap", 8 * 5)
    flip(root / "stores/replay/rows/n/i.memmap", 8 * 2)
    (finding,) = check_root(root).findings
    assert (finding.store, list(finding.rows)) == ("replay", [2, 5])
    (repaired,) = check_root(root, repairs=True).findings
    assert repaired.repaired == "2 rows were dropped"
    flip(root / "stores/tensordict/rows/obs.memmap", 12 * 3 + 1)
    (finding,) = check_root(root, repairs=True).findings
    assert (finding.store, list(finding.rows)) == ("tensordict", [3])
    assert "until they are written again" in finding.repaired


def test_rows_when_their_checksums_are_damaged_too_then_those_that_do_not_match_them_go(root: Path) -> None:
    flip(root / "stores/replay/rows/x.memmap", 8 * 5)
    flip(root / "stores/replay/synced.memmap", 4096 + 16 * 2 + 9)  # the checksum of row 2
    flip(root / "stores/replay/synced.memmap", 4096 + 16 * 1 + 1)  # the generation of row 1
    (dropped,) = [finding for finding in check_root(root, repairs=True).findings if finding.rows]
    assert (list(dropped.rows), dropped.repaired) == ([1, 2, 5], "3 rows were dropped")
    assert "checksum" in dropped.reason
    assert check_root(root).findings == ()


def test_rows_when_nothing_but_their_checksums_is_damaged_then_all_stay(root: Path) -> None:
    flip(root / "stores/replay/synced.memmap", 4096 + 16 * 2 + 9)
    (finding,) = check_root(root, repairs=True).findings
    assert (finding.rows, finding.repaired) == ((), "it was removed, and is made again")


def test_rows_when_they_have_changed_and_all_checksums_are_lost_then_stay_and_the_remedy_is_named(root: Path) -> None:
    flip(root / "stores/replay/rows/x.memmap", 8 * 5)
    flip(root / "stores/replay/synced.memmap", 0)
    for repairs in (True, False):
        report = check_root(root, repairs=repairs)
        assert name_faults(report) == ["stores/replay/synced.memmap"]
        assert "restore a checkpoint" in report.findings[-1].remedy


def test_version_when_another_is_whole_then_dropped_and_otherwise_stays_and_the_remedy_is_named(root: Path) -> None:
    flip(root / "stores/policy/versions/1.safetensors", -1)
    (dropped,) = check_root(root, repairs=True).findings
    assert dropped.repaired == "it was dropped"
    assert check_root(root).findings == ()
    flip(root / "stores/policy/versions/2.safetensors", -1)
    (last,) = check_root(root, repairs=True).findings
    assert last.repaired == ""
    assert "publish again" in last.remedy


def test_store_when_the_catalog_has_lost_it_then_is_taken_back(root: Path) -> None:
    for name in ("replay", "tensordict"):
        edit_catalog(root, lambda txn, name=name: txn.delete("stores", name.encode()))
    faults = check_root(root)
    assert [each.path for each in faults.findings if "no store of this name" in each.reason] == [
        "stores/replay",
        "stores/tensordict",
    ]
    report = check_root(root, repairs=True)
    assert name_faults(report) == []
    assert {each.repaired.partition(",")[0] for each in report.findings if each.path.startswith("stores/")} == {
        "it is a store again"
    }
    assert check_root(root).findings == ()


def test_folder_when_it_was_never_a_store_then_is_set_aside_and_named_until_it_goes(root: Path) -> None:
    (root / "stores" / "strange" / "rows").mkdir(parents=True)
    for repairs in (True, True, False):
        (left,) = check_root(root, repairs=repairs).findings
        assert left.path.startswith("stores/.lost-strange-")
        assert (left.is_not_served, left.repaired, left.remedy) == (
            True,
            "",
            "it has neither rows nor versions: delete it",
        )
    (root / left.path / "rows").rmdir()
    (root / left.path).rmdir()
    assert check_root(root).findings == ()


def test_stores_when_neither_catalog_nor_copy_has_them_then_set_aside_as_not_served_with_a_remedy_for_each_kind(
    root: Path,
) -> None:
    lose_stores(root)
    assert check_root(root).num_not_served == len(LOST)
    for repairs in (True, True, False):
        report = check_root(root, repairs=repairs)
        assert report.num_damaged == report.num_not_served == len(LOST)
        found = {each.path.split("-")[1]: each for each in report.findings}
        assert set(found) == set(LOST)
        for name, remedy in LOST.items():
            assert remedy in found[name].remedy
            assert found[name].repaired == ""
    for each in report.findings:
        shutil.rmtree(root / each.path)
    assert check_root(root).findings == ()


def test_leftovers_when_found_then_are_no_damage_and_go(root: Path) -> None:
    for name in ("stores/.deleted-x", "checkpoints/20260101", "arriving/move"):
        (root / name).mkdir(parents=True)
    (root / "synced/catalog.mdb.new").write_bytes(b"cut")
    report = check_root(root)
    assert (len(report.findings), report.num_damaged) == (4, 0)
    assert len(check_root(root, repairs=True).findings) == 4
    assert check_root(root).findings == ()


def test_catalog_when_it_and_its_copy_are_gone_then_nothing_changes_and_the_remedy_is_named(root: Path) -> None:
    shutil.rmtree(root / "catalog")
    (root / "synced" / "catalog.mdb").unlink()
    run = (root / "run.json").read_bytes()
    for repairs in (True, True, False):
        (fault,) = [each for each in check_root(root, repairs=repairs).findings if not each.repaired]
        assert fault.path == "catalog/data.mdb"
        assert "tdserve restore PLACE --root OTHER" in fault.remedy
    assert (root / "run.json").read_bytes() == run


def test_store_when_its_folder_is_gone_then_one_fault(root: Path) -> None:
    shutil.rmtree(root / "stores/replay")
    (finding,) = check_root(root).findings
    assert (finding.path, finding.reason) == ("stores/replay", "its folder is gone")


LOST = {
    "entries": "restore a checkpoint",
    "no rows": "as a tensordict store without checksums, without its non-tensor values: move ",
    "policy": "client.publish('policy', TensorDict(safetensors.torch.load_file(",
    "queue": "priorities and settings of the table or queue, which 3 of its 10 rows have content: move ",
    "replay": "tdserve adopt PATH replay",
    "tensordict": "tdserve adopt PATH tensordict",
}
"""Stores of the stored root that have folders, and what to do with each."""


def lose_stores(root: Path) -> None:
    """Takes the stores that have folders out of the catalog and its copy."""
    for name in LOST:
        edit_catalog(root, lambda txn, name=name: txn.delete("stores", name.encode()))
    shutil.copy(root / "catalog/data.mdb", root / "synced/catalog.mdb")
    record_sums(root, rereads=True)


def edit_catalog(root: Path, change: Callable[..., object]) -> None:
    with CatalogDB(root / "catalog") as db, db.begin_transaction() as txn:
        change(txn)
    record_sums(root, rereads=True)


def test_root_when_a_server_has_it_then_refused(root: Path) -> None:
    held = Root.acquire(root)
    with pytest.raises(RootInUseError):
        check_root(root)
    held.release()


def test_root_when_of_a_newer_format_or_none_then_refused_and_unchanged(root: Path) -> None:
    content = encode_checked({"format_version": 99, "server_id": "x"})
    (root / "tdserve.json").write_bytes(content)
    with pytest.raises(NotSupportedError, match=r"99.*newer"):
        check_root(root, repairs=True)
    assert (root / "tdserve.json").read_bytes() == content
    with pytest.raises(InvalidRequestError, match="no root of a server"):
        check_root(root / "stores")
    assert not (root / "stores" / "tdserve.lock").exists()


def test_root_when_the_power_was_lost_since_then_refused(root: Path) -> None:
    (root / "run.json").write_bytes(encode_checked({"boot_id": "another", "is_synced": False}))
    with pytest.raises(WrongStateError, match="without --repair, or before a server has started"):
        check_root(root)


@pytest.fixture
def killed(root: Path) -> Path:
    """The root as its server would have left it if it had been killed after a sync."""
    (root / "run.json").write_bytes(encode_checked({"boot_id": read_boot_id(), "is_synced": False}))
    return root


def damage_record(path: Path, table: str, *, number: int = 0) -> bytes:
    """Flips a bit of a record, and returns its key."""
    with lmdb.open(str(path), subdir=False, lock=False, max_dbs=16) as env:
        db = env.open_db(table.encode(), create=False)
        with env.begin(write=True) as txn:
            key, record = list(txn.cursor(db=db))[number]
            txn.put(key, bytes([record[0] ^ 1]) + record[1:], db=db)
            return bytes(key)


@pytest.mark.slow
def test_server_when_killed_then_rows_values_versions_and_records_are_compared(killed: Path) -> None:
    assert name_faults(check_root(killed)) == []
    damage_record(killed / "stores/replay/objects/data.mdb", "values", number=1)
    damage_record(killed / "stores/entries/objects/data.mdb", "entries")
    damage_record(killed / "catalog/data.mdb", "states")
    flip(killed / "stores/queue/rows/x.memmap", 8)
    flip(killed / "stores/policy/versions/2.safetensors", -1)
    flip(killed / "stores/no rows/rows/scalar.memmap", 0)
    names = {
        "catalog/data.mdb",
        "stores/entries/objects/data.mdb",
        "stores/no rows",
        "stores/policy/versions/2.safetensors",
        "stores/queue",
        "stores/replay/objects/data.mdb",
    }
    assert set(name_faults(check_root(killed))) == names
    report = check_root(killed, repairs=True)
    assert name_faults(report) == []
    assert name_faults(check_root(killed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("table", ["stores", "specs", "states", "packed", "requests"])
def test_record_of_the_catalog_when_damaged_then_comes_from_the_copy(killed: Path, table: str) -> None:
    with CatalogDB(killed / "catalog", is_read_only=True) as db:
        before = dict(db.scan("stores"))
    key = damage_record(killed / "catalog/data.mdb", table)
    with CatalogDB(killed / "catalog", is_read_only=True) as db, pytest.raises(CorruptDataError, match="tdserve check"):
        db.get(table, key)  # type: ignore[arg-type]
    (finding,) = check_root(killed, repairs=True).findings
    assert finding.repaired.startswith("0 records" if table == "requests" else "1 records")
    with CatalogDB(killed / "catalog", is_read_only=True) as db:
        assert dict(db.scan("stores")) == before
    assert check_root(killed).findings == ()
