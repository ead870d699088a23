"""One LMDB environment per folder and process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn, cast

import pytest

from tdserve.base.errors import CorruptDataError, WrongStateError
from tdserve.store.database import environments

MAX_BYTES = 1 << 20
NUM_VALUES = 50


def test_environment_when_acquired_by_two_names_then_is_one(tmp_path: Path) -> None:
    first = environments.acquire(tmp_path / "a", writable=True, max_bytes=MAX_BYTES)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    second = environments.acquire(tmp_path / "b", writable=False, max_bytes=MAX_BYTES)
    assert second is first
    environments.release(first)
    with second.env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    environments.release(second)
    again = environments.acquire(tmp_path / "a", writable=True, max_bytes=MAX_BYTES)
    assert again is not first
    environments.release(again)


def test_environment_when_the_disk_is_full_then_refused_and_no_file_without_pages_stays(
    small_disk: Path,
) -> None:
    with suppress(OSError), (small_disk / "filled").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    made = (
        "import pathlib, sys\n"
        "from tdserve.store.database import environments\n"
        "environments.acquire(pathlib.Path(sys.argv[1]), writable=True, max_bytes=1 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", made, str(small_disk)], capture_output=True, text=True, check=False)
    assert "CapacityError" in done.stderr
    assert not (small_disk / environments.LOCK_FILE).exists()


def test_environment_when_made_then_its_lock_file_has_no_holes(tmp_path: Path) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES))
    found = (tmp_path / environments.LOCK_FILE).stat()
    assert found.st_size == environments.LOCK_FILE_BYTES
    assert found.st_blocks * 512 >= found.st_size


def test_environment_when_open_for_reading_then_refuses_a_writer(tmp_path: Path) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES))
    reader = environments.acquire(tmp_path, writable=False, max_bytes=MAX_BYTES)
    with pytest.raises(WrongStateError):
        environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    environments.release(reader)


def test_environment_when_folder_is_missing_then_a_reader_makes_none(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError):
        environments.acquire(tmp_path / "none", writable=False, max_bytes=MAX_BYTES)
    assert not (tmp_path / "none").exists()


def test_environment_when_inherited_by_fork_then_the_child_opens_its_own(tmp_path: Path) -> None:
    parents = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    with parents.env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    child = os.fork()
    if child == 0:
        childs = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
        with childs.env.begin(write=True) as txn:
            found = txn.get(b"k") == b"v" and childs is not parents and txn.put(b"child", b"1")
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    with parents.env.begin(write=True) as txn:
        assert txn.get(b"child") == b"1"
        txn.put(b"parent", b"2")
    environments.release(parents)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["opens it", "closes it", "leaves in an orderly way", "is not used"])
def test_environment_when_a_fork_parts_with_what_it_inherited_then_the_parent_still_reads_one_moment(
    tmp_path: Path, ending: str
) -> None:
    """The parent is in the middle of a read, and a writer elsewhere would use pages that nobody reads."""
    with _writer(tmp_path) as write:
        write(b"old")
        parents = environments.acquire(tmp_path, writable=False, max_bytes=0)
        with parents.env.begin(buffers=True) as txn:
            txn.get(b"0")
            gc.collect()  # queues of grpc.aio that other tests have dropped would wait for their threads in the child
            child = os.fork()
            if child == 0:
                _end_child(tmp_path, parents, ending)
            assert os.waitpid(child, 0)[1] == 0
            for number in range(20):
                write(b"new%d" % number)
            assert {bytes(txn.get(b"%d" % number) or b"") for number in range(NUM_VALUES)} == {b"old" * 500}
        with parents.env.begin() as txn:
            assert txn.get(b"0") == b"new19" * 500
        environments.release(parents)


def test_environment_when_a_fork_cannot_part_with_it_then_refuses_it_there_and_leaves_the_parents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES))
    parents = environments.acquire(tmp_path, writable=False, max_bytes=0)
    with parents.env.begin() as txn:
        txn.get(b"k")

    def refuse(_files: object) -> None:
        raise CorruptDataError(path="/proc/self/maps", expected="mappings", actual="none")

    monkeypatch.setattr(environments, "make_private", refuse)
    child = os.fork()
    if child == 0:
        try:
            environments.acquire(tmp_path, writable=False, max_bytes=0)
        except WrongStateError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(parents.env.readers().strip().splitlines()) == 2  # a heading, and this process' slot
    environments.release(parents)


def _end_child(folder: Path, parents: environments.Environment, ending: str) -> NoReturn:
    is_well = True
    if ending == "opens it":
        childs = environments.acquire(folder, writable=False, max_bytes=0)
        with childs.env.begin() as txn:
            is_well = txn.get(b"0") == b"old" * 500
        environments.release(childs)
    elif ending == "closes it":
        parents.env.close()
    elif ending == "leaves in an orderly way":
        del parents
        vars(environments).clear()  # as the interpreter does
        gc.collect()
    os._exit(0 if is_well else 1)


@contextlib.contextmanager
def _writer(folder: Path) -> Iterator[Callable[[bytes], None]]:
    """Another process. For each value that it gets, it writes that to all keys in one transaction."""
    code = """if True:
        import sys, pathlib
        from tdserve.store.database import environments
        env = environments.acquire(pathlib.Path(sys.argv[1]), writable=True, max_bytes=1 << 24).env
        for line in sys.stdin:
            with env.begin(write=True) as txn:
                for number in range(int(sys.argv[2])):
                    txn.put(b"%d" % number, line.strip().encode() * 500)
            print("done", flush=True)
    """
    command = [sys.executable, "-c", code, str(folder), str(NUM_VALUES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        orders, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)

        def write(value: bytes) -> None:
            orders.write(value + b"\n")
            orders.flush()
            assert answers.readline() == b"done\n"

        yield write


def test_environment_when_its_files_were_made_anew_then_is_another(tmp_path: Path) -> None:
    first = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    for name in (environments.DATA_FILE, environments.LOCK_FILE):
        (tmp_path / name).unlink()
    second = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    assert second is not first
    assert (tmp_path / environments.DATA_FILE).exists()
    environments.release(first)
    environments.release(second)


def test_environment_when_a_reader_names_no_size_then_has_the_writers(tmp_path: Path) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=3 << 20))
    reader = environments.acquire(tmp_path, writable=False, max_bytes=0)
    assert reader.env.info()["map_size"] == 3 << 20
    environments.release(reader)
