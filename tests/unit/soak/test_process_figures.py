"""Figures of processes and folders, measured on some whose size is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.soak.process_figures import find_parent, is_gone, list_descendants, measure_disk, measure_processes

MIB = 1 << 20

HOLD = f"""
import sys
held = bytearray(64 * {MIB}); held[:] = b"1" * len(held)
files = [open("/dev/null") for _ in range(20)]
print("ready", flush=True); sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_when_one_holds_memory_and_files_then_both_show() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holding:
        assert holding.stdout is not None
        assert holding.stdin is not None
        assert holding.stdout.readline() == "ready\n"
        figures = measure_processes([holding.pid])
        assert figures is not None
        assert 64 * MIB < figures.anonymous_nbytes <= figures.memory_nbytes < 160 * MIB
        assert 22 <= figures.num_descriptors < 40
        assert figures.num_threads == 1
        assert find_parent(holding.pid) == os.getpid()
        assert holding.pid in list_descendants(os.getpid())
        both = measure_processes([holding.pid, os.getpid()])
        assert both is not None
        assert both.num_threads > figures.num_threads
        holding.stdin.close()
    assert is_gone(holding.pid)
    assert measure_processes([holding.pid]) is None
    assert measure_processes([]) is None


def test_disk_when_files_are_sparse_then_only_their_blocks_count(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "full").write_bytes(b"1" * MIB)
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(100 * MIB)
    nbytes, num_files = measure_disk(tmp_path)
    assert MIB <= nbytes < 2 * MIB
    assert num_files == 2
