"""Spool files: another process reads what a client puts there, and their space is used again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, ConnectError, RemoteProtocolError, TDServeError
from tdserve.store.exchange.spools import Spool, SpoolWriter, make_spool_path, read_spooled, remove_spool
from tdserve.values.value_columns import Buffer
from tests.processes import num_open_below
from tests.unit.store.conftest import SMALL_DISK_BYTES


def read(folder: Path, place: tuple[int, int]) -> bytes:
    """Reads as a worker does."""
    return read_spooled(str(make_spool_path(folder, "lock")), *place)


def put(spool: Spool, parts: Sequence[Buffer]) -> tuple[int, int]:
    """Writes as a client does."""
    return spool.put(parts, sum(map(len, parts)))


def test_put_when_several_then_each_is_read_as_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "lock")
    assert os.listdir(tmp_path) == []
    contents = [b"", b"a", bytes(range(256)) * 300, b"z" * (1 << 16), b"y" * ((1 << 16) + 1)]
    places = [put(spool, [content]) for content in contents]
    assert [read(tmp_path, place) for place in places] == contents
    spool.close()
    spool.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("times", [1, 300], ids=["small", "large"])
@pytest.mark.parametrize("num_parts", [0, 1, 1024, 1025, 5000])
def test_put_when_given_in_parts_then_they_follow_one_another(tmp_path: Path, num_parts: int, times: int) -> None:
    spool = Spool(tmp_path, "lock")
    parts = [memoryview(b"%d" % number * times) for number in range(num_parts)]
    put(spool, [b"before"])
    assert read(tmp_path, put(spool, parts)) == b"".join(parts)
    spool.close()


def test_put_when_the_kernel_writes_less_at_once_then_the_rest_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, alone = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: whole(fd, parts[:1], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, content, offset: alone(fd, content[:7], offset))
    spool = Spool(tmp_path, "lock")
    parts = [b"abc" * 300, b"defghijklm" * 300, b"", b"nopq"]
    assert read(tmp_path, put(spool, parts)) == b"".join(parts)
    spool.close()


def test_put_when_others_were_freed_then_their_place_is_used_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "lock")
    first, second = put(spool, [b"a" * 70_000]), put(spool, [b"b" * 70_000])
    spool.free(*first)
    third = put(spool, [b"c" * 90_000])
    assert third[0] == first[0]
    assert read(tmp_path, second) == b"b" * 70_000
    nbytes = make_spool_path(tmp_path, "lock").stat().st_size
    for number in range(50):
        spool.free(*third)
        third = put(spool, [b"%c" % number * 90_000])
    assert read(tmp_path, third) == b"%c" % 49 * 90_000
    assert make_spool_path(tmp_path, "lock").stat().st_size <= nbytes + 90_000
    spool.close()


def test_put_when_several_threads_do_then_none_touches_the_others(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "lock")

    def fill(number: int) -> bool:
        content = bytes([number]) * (40_000 + 1000 * number)
        for _ in range(20):
            place = put(spool, [content])
            if read(tmp_path, place) != content:
                return False
            spool.free(*place)
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill, range(8)))
    spool.close()


def test_put_when_the_session_is_over_then_refused_and_no_file_comes_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "lock")
    put(spool, [b"a"])
    spool.close()
    with pytest.raises(ConnectError, match="over"):
        put(spool, [b"b"])
    assert os.listdir(tmp_path) == []


def test_put_when_done_then_only_the_spools_own_file_is_open(tmp_path: Path) -> None:
    num_open = num_open_below(tmp_path)
    spool = Spool(tmp_path, "lock")
    for _ in range(3):
        put(spool, [b"a" * 100_000])
    assert num_open_below(tmp_path) == num_open + 1
    spool.close()
    assert num_open_below(tmp_path) == num_open


def test_put_when_the_file_is_a_symbolic_link_then_refused_and_its_target_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    make_spool_path(tmp_path, "lock").symlink_to(tmp_path / "target")
    with pytest.raises(TDServeError):
        put(Spool(tmp_path, "lock"), [b"theirs"])
    assert (tmp_path / "target").read_bytes() == b"mine"
    with pytest.raises(RemoteProtocolError):
        read(tmp_path, (0, 4))


def test_put_when_the_disk_is_full_then_capacity_error(small_disk: Path) -> None:
    spool = Spool(small_disk, "lock")
    with pytest.raises(CapacityError):
        put(spool, [bytes(2 * SMALL_DISK_BYTES)])
    spool.close()


@pytest.mark.parametrize("place", [(0, 5), (4, 1), (1 << 40, 1), (0, 1 << 62), (1 << 63, 1), (-1, 1)])
def test_read_when_it_is_not_there_then_the_clients_fault(tmp_path: Path, place: tuple[int, int]) -> None:
    make_spool_path(tmp_path, "lock").write_bytes(b"1234")
    with pytest.raises(RemoteProtocolError):
        read(tmp_path, place)


def test_read_when_there_is_no_file_then_the_clients_fault(tmp_path: Path) -> None:
    with pytest.raises(RemoteProtocolError, match="No such file"):
        read(tmp_path, (0, 1))


def test_write_when_a_larger_block_was_there_then_only_the_new_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "staging" / "0.values"
    num_open = num_open_below(tmp_path)
    for content in (b"a" * 1000, b"b" * 300 + b"c" * 300):
        with SpoolWriter(str(path)) as writer:
            writer.write(300, memoryview(content)[300:])
            writer.write(0, memoryview(content)[:300])
        assert read_spooled(str(path), 0, len(content)) == content
    assert num_open_below(tmp_path) == num_open
    remove_spool(str(path))
    remove_spool(str(path))
    assert os.listdir(path.parent) == []


def test_write_when_a_link_is_there_then_refused_and_its_target_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "0.values").symlink_to(tmp_path / "target")
    with pytest.raises(TDServeError):
        SpoolWriter(str(tmp_path / "0.values"))
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_write_when_the_disk_is_full_then_capacity_error(small_disk: Path) -> None:
    with SpoolWriter(str(small_disk / "0.values")) as writer, pytest.raises(CapacityError):
        writer.write(0, memoryview(bytes(2 * SMALL_DISK_BYTES)))
