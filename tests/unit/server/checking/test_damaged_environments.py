"""Damage of the pages of LMDB's environments in a root that a server has left in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

import lmdb
import pytest

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.server.checking.repair_process import run_apart
from tdserve.server.checking.root_check import check_root
from tdserve.store.database.environments import find_damage
from tdserve.store.database.page_walk import META_BYTES
from tests.damaged_pages import damage_free_pages
from tests.roots import make_quick_root
from tests.stored_root.unpacking import unpack_root

TRANSACTION_AT = META_BYTES - 8
"""Place of the number of the last transaction in each of the first two pages."""

"""Places in these, and in a page of records."""

ENVIRONMENTS = ("catalog/data.mdb", "stores/entries/objects/data.mdb", "stores/replay/objects/data.mdb")


@pytest.fixture
def root() -> Iterator[Path]:
    """A copy of the stored root."""
    with make_quick_root() as folder:
        yield unpack_root(folder / "root")


def find_older(content: bytes | bytearray) -> int:
    """Returns where the page begins that leads to the records before the last transaction."""
    numbers = [
        int.from_bytes(content[page + TRANSACTION_AT : page + TRANSACTION_AT + 8], "little") for page in (0, PAGESIZE)
    ]
    return PAGESIZE * numbers.index(min(numbers))


def raise_number(path: Path, *, bit: int) -> bytes:
    """Makes the older tree of a file the newest; returns the file's content before."""
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[find_older(content) + TRANSACTION_AT + bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    return content


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_root_when_an_earlier_tree_would_be_taken_for_the_last_then_the_byte_is_named_and_put_back(
    root: Path, name: str
) -> None:
    content = raise_number(root / name, bit=17)
    (found,) = (each for each in check_root(root).findings if each.path == name)
    assert "which leads to its records, has changed" in found.reason
    report = check_root(root, repairs=True)
    assert [(each.path, bool(each.repaired)) for each in report.findings] == [(name, True)]
    assert report.num_damaged == 0
    assert (root / name).read_bytes() == content
    assert check_root(root).findings == ()


def test_root_when_more_has_changed_than_that_byte_and_no_copy_then_nothing_is_called_whole(root: Path) -> None:
    path = root / "stores/entries/objects/data.mdb"
    (root / "stores/entries/synced-values/data.mdb").unlink()
    raise_number(path, bit=17)
    raise_number(path, bit=42)
    damaged = path.read_bytes()
    report = check_root(root, repairs=True)
    (found,) = (each for each in report.findings if each.path == "stores/entries/objects/data.mdb")
    assert "it is unknown which of them is damaged" in found.reason
    assert report.num_damaged == 1
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", ["replay", "entries", "tensordict"])
def test_values_when_their_pages_are_damaged_and_the_copy_is_whole_then_nothing_is_lost(root: Path, name: str) -> None:
    path = root / f"stores/{name}/objects/data.mdb"
    path.write_bytes(path.read_bytes()[: 2 * PAGESIZE].ljust(path.stat().st_size, b"\7"))
    report = check_root(root, repairs=True)
    (found,) = (each for each in report.findings if each.path == f"stores/{name}/objects/data.mdb")
    assert "nothing is lost" in found.repaired
    assert report.num_damaged == 0
    assert check_root(root).findings == ()
    assert path.stat().st_size == (root / f"stores/{name}/synced-values/data.mdb").stat().st_size


def test_values_when_their_copy_is_damaged_too_then_they_are_not_replaced_by_it(root: Path) -> None:
    for folder in ("objects", "synced-values"):
        path = root / f"stores/replay/{folder}/data.mdb"
        content = path.read_bytes()
        path.write_bytes(content[: 2 * PAGESIZE].ljust(len(content), b"\7"))
    report = check_root(root, repairs=True)
    (found,) = (each for each in report.findings if each.path == "stores/replay/objects/data.mdb")
    assert not found.repaired
    assert "restore the store from a checkpoint" in found.remedy


def test_catalog_when_a_record_and_the_list_of_free_pages_are_damaged_then_both_are_repaired(root: Path) -> None:
    path = root / "catalog/data.mdb"
    with lmdb.open(str(path), subdir=False, lock=False, max_dbs=16) as env:
        states = env.open_db(b"states", create=False)
        with env.begin(write=True, db=states) as txn:
            key, record = next(iter(txn.cursor()))
            txn.put(bytes(key), bytes([record[0] ^ 1]) + bytes(record[1:]))
    damage_free_pages(path)
    report = check_root(root, repairs=True)
    assert report.num_damaged == 0
    assert check_root(root).findings == ()


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("lowered", [2, 4])
def test_environment_when_its_newest_number_is_lowered_then_refused_also_without_checksums_of_files(
    root: Path, name: str, lowered: int
) -> None:
    path = root / name
    content = bytearray(path.read_bytes())
    at = PAGESIZE - find_older(content) + TRANSACTION_AT
    number = int.from_bytes(content[at : at + 8], "little")
    content[at : at + 8] = (number - lowered).to_bytes(8, "little")
    path.write_bytes(content)
    assert "it is unknown which of them is damaged" in find_damage(path)
    (root / "synced/sums.json").unlink()
    assert any(each.path == name for each in check_root(root).findings)


def test_root_when_faults_hide_its_rows_then_the_check_names_that(root: Path) -> None:
    path = root / "stores/queue/rows/x.memmap"
    path.write_bytes(path.read_bytes()[:-8])
    assert any("hide whether its rows are whole" in each.reason for each in check_root(root).findings)
    assert not any("hide" in each.reason for each in check_root(root, repairs=True).findings)


def end_by_signal() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


def refuse() -> str:
    raise InvalidRequestError(argument="rows", reason="there are none")


def test_repair_when_it_ends_its_process_then_an_error_and_this_one_goes_on() -> None:
    assert run_apart(lambda: "done", path="data.mdb").done == "done"
    with pytest.raises(CorruptDataError, match="SIGKILL"):
        run_apart(end_by_signal, path="data.mdb")
    with pytest.raises(CorruptDataError, match="there are none"):
        run_apart(refuse, path="data.mdb")
