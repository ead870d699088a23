"""Filling of version files: right bytes whichever way they take, and few page faults once the disk has the pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tdserve.store.weights.version_filling import GROUP_NBYTES, count_faults, fill

START = 4096

Bytes = NDArray[np.uint8]


class MappedFile:
    """A file with a writable mapping; takes over the descriptor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = fd
        os.ftruncate(self.fd, START + nbytes)
        self.memory: Bytes = np.frombuffer(mmap.mmap(self.fd, START + nbytes), np.uint8)

    def fill(self, pieces: list[Bytes], **named: object) -> None:
        """Fills it from ``START`` on."""
        fill(self.fd, self.memory, START, iter(pieces), **named)  # type: ignore[arg-type]

    def read(self) -> Bytes:
        """What is behind ``START``."""
        return np.frombuffer(os.pread(self.fd, self.nbytes, START), np.uint8)


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[Callable[[int], MappedFile]]:
    made: list[MappedFile] = []

    def make(nbytes: int) -> MappedFile:
        made.append(MappedFile(os.open(tmp_path / str(len(made)), os.O_RDWR | os.O_CREAT), nbytes))
        return made[-1]

    yield make
    for each in made:
        os.close(each.fd)


def make_pieces(*sizes: int) -> list[Bytes]:
    """Returns pieces of random bytes."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


NO_FAULTS = [0]
MANY_FAULTS = [1024]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (5,), (3, 0, 9), [7] * 100, (GROUP_NBYTES - START, 1), (3 * GROUP_NBYTES,)]
)
@pytest.mark.parametrize("is_touched", [False, True])
@pytest.mark.parametrize("faults", [NO_FAULTS, MANY_FAULTS, [*NO_FAULTS, *MANY_FAULTS]])
def test_fill_when_done_then_the_file_and_its_mapping_have_all_pieces(
    make_file: Callable[[int], MappedFile], sizes: list[int], is_touched: bool, faults: list[int]
) -> None:
    pieces = make_pieces(*sizes)
    file = make_file(sum(sizes))
    counted = map(sum, zip(count(), cycle(faults)))
    file.fill(pieces, is_touched=is_touched, count_faults=lambda: next(counted))
    expected = np.concatenate([np.empty(0, np.uint8), *pieces])
    assert np.array_equal(file.read(), expected)
    assert np.array_equal(file.memory[START:], expected)
    assert not file.memory[:START].any()


def count_written() -> int:
    """Returns the bytes that this thread has written to files so far by calls."""
    facts = Path("/proc/thread-self/io").read_text(encoding="ascii").split()
    return int(facts[facts.index("wchar:") + 1])


def fill_counted(file: MappedFile, pieces: list[Bytes], **named: object) -> tuple[int, int]:
    """Fills a file; returns how many bytes were written by calls, and how many page faults this took."""
    written, faults = count_written(), count_faults()
    file.fill(pieces, **named)
    faults = count_faults() - faults
    return count_written() - written, faults


@pytest.mark.slow
def test_fill_when_the_disk_has_all_pages_then_few_page_faults(make_file: Callable[[int], MappedFile]) -> None:
    pieces = make_pieces(*[2_500_001] * 16)
    file = make_file(16 * 2_500_001)
    file.memory[:] = 1
    os.fsync(file.fd)
    written, faults = fill_counted(file, pieces, is_touched=True)
    assert faults <= 2 * GROUP_NBYTES // mmap.PAGESIZE < file.nbytes // mmap.PAGESIZE // 4, written
    assert np.array_equal(file.read(), np.concatenate(pieces))


def test_fill_when_nothing_is_touched_then_all_is_written(make_file: Callable[[int], MappedFile]) -> None:
    pieces = make_pieces(3 * GROUP_NBYTES, 7)
    file = make_file(3 * GROUP_NBYTES + 7)
    written, faults = fill_counted(file, pieces, is_touched=False)
    assert written == file.nbytes
    assert faults < GROUP_NBYTES // mmap.PAGESIZE // 4


def test_fill_when_every_page_is_touched_then_nothing_is_written() -> None:
    pieces = make_pieces(2 * GROUP_NBYTES, *[70_000] * 100)
    file = MappedFile(os.memfd_create("touched"), 2 * GROUP_NBYTES + 7_000_000)  # no disk takes these pages
    file.memory[:] = 1
    assert fill_counted(file, pieces, is_touched=True)[0] == 0
    assert np.array_equal(file.read(), np.concatenate(pieces))
    os.close(file.fd)


def test_fill_when_repeated_then_twice_as_many_groups_are_touched_each_time(
    make_file: Callable[[int], MappedFile],
) -> None:
    num_groups = 10
    pieces = make_pieces(num_groups * GROUP_NBYTES - START)
    file = make_file(len(pieces[0]))
    touched: list[int] = []
    for num_touched in (0, 1, 3, 7, 10):
        counts = iter([fault for group in range(num_groups) for fault in (0, 0 if group < num_touched else 1024)])
        written, _ = fill_counted(file, pieces, is_touched=True, count_faults=lambda counts=counts: next(counts))
        touched.append(num_groups - written // GROUP_NBYTES)
    assert touched == [1, 3, 7, 10, 10]
