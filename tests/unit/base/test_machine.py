from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tdserve.base import machine
from tdserve.base.machine import (
    count_descriptors,
    count_oom_kills,
    explain_not_shared,
    read_boot_id,
    read_pid_namespace,
    read_process_use,
)

PRINT_IDS = (
    "from tdserve.base.machine import read_boot_id, read_pid_namespace; print(read_boot_id(), read_pid_namespace())"
)


def test_ids_when_of_two_processes_of_one_machine_then_equal() -> None:
    out = subprocess.run([sys.executable, "-c", PRINT_IDS], capture_output=True, text=True, check=True).stdout.split()
    assert out == [read_boot_id(), read_pid_namespace()]
    assert len(read_boot_id()) == 36


def test_pid_namespace_when_another_then_differs_and_the_machine_is_the_same() -> None:
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", PRINT_IDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("a pid namespace of its own needs root")
    boot, namespace = done.stdout.split()
    assert boot == read_boot_id()
    assert namespace not in (read_pid_namespace(), "")


def test_ids_when_there_is_no_proc_then_empty() -> None:
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" -c "$1"', sys.executable]
    program = "from tdserve.base.machine import *; print([read_boot_id(), read_pid_namespace()])"
    done = subprocess.run([*command, program], capture_output=True, text=True, check=False, cwd=os.getcwd())
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("to hide /proc needs root")
    assert done.stdout.strip() == "['', '']", done.stderr


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_sharing_when_the_processor_keeps_its_order_then_nothing_is_against_it(machine: str) -> None:
    assert explain_not_shared(machine) == ""


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ppc64le", "riscv64", "s390x", ""])
def test_sharing_when_the_processor_may_change_the_order_then_the_reason_names_it(machine: str) -> None:
    assert machine in explain_not_shared(machine)
    assert "x86-64 only" in explain_not_shared(machine)


@pytest.mark.parametrize("keeps", [True, False])
def test_keep_freed_memory_when_much_is_freed_then_its_pages_stay(keeps: bool) -> None:
    lines = [
        "from tdserve.base.machine import keep_freed_memory",
        "keep_freed_memory()" if keeps else "",
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096",
        "before = resident()",
        "content = b'x' * (24 << 20)",
        "del content",
        "print(resident() - before)",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert (int(out) > 20 << 20) == keeps


def large_pages_kib(calls: str) -> int:
    """KiB of large pages behind a filled array of 64 MiB, in a process that made these calls first."""
    lines = [
        "import numpy",
        "from tdserve.base.machine import use_small_pages",
        calls,
        "held = numpy.ones(64 << 20, numpy.uint8)",
        "found = [line.split()[1] for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')]",
        "print(sum(map(int, found)))",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    return int(out)


@pytest.mark.slow
def test_use_small_pages_when_an_array_is_large_then_it_gets_its_memory_by_small_ones() -> None:
    if large_pages_kib("") == 0:
        pytest.skip("the kernel gives no large pages here")
    assert large_pages_kib("use_small_pages()") == 0
    assert large_pages_kib("use_small_pages(); use_small_pages(False)") > 0


def test_count_oom_kills_when_no_process_ran_out_of_memory_between_then_the_same_number() -> None:
    assert count_oom_kills() == count_oom_kills() >= 0


def test_count_oom_kills_when_the_kernel_counts_them_then_read_by_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told").write_text("oom 7\noom_kill 3\noom_kill_group 9\n")
    monkeypatch.setattr(machine, "OOM_COUNTERS", (str(tmp_path / "told"), str(tmp_path / "none")))
    assert count_oom_kills() == 3


def run_limited(limits: tuple[int, int], code: str) -> str:
    """What a program prints that runs with these limits of descriptors, and ends well."""
    program = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits}); {code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_raise_descriptor_limit_when_the_soft_one_is_lower_then_as_many_as_may_be() -> None:
    code = (
        "from tdserve.base.machine import *; "
        "print(get_descriptor_limit(), raise_descriptor_limit(), get_descriptor_limit())"
    )
    assert run_limited((100, 300), code) == "100 300 300"


def test_count_descriptors_when_some_are_opened_then_counts_them() -> None:
    before = count_descriptors()
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(open(os.devnull))
        assert count_descriptors() == before + 5 == count_descriptors(os.getpid())
    assert count_descriptors(2**22 - 1) == 0


def test_process_use_when_it_lives_then_its_memory_time_and_descriptors_and_none_when_it_is_gone() -> None:
    own = read_process_use()
    assert own.resident_bytes > own.anonymous_bytes > 1 << 20
    assert own.cpu_s > 0
    assert own.num_descriptors == count_descriptors()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert 0 < read_process_use(child.pid).resident_bytes < 1 << 30
    assert read_process_use(child.pid) == (0, 0, 0.0, 0)


HOLD_FREED = f"""
import sys
from threading import Event, Thread
from tdserve.base.machine import keep_freed_memory, share_arenas
keep_freed_memory()
if "share" in sys.argv:
    share_arenas()
over, threads = Event(), []
for _ in range(12):
    freed = Event()
    def work(freed=freed):
        held = bytearray(12 * {1 << 20}); held[:] = b"1" * len(held); del held
        freed.set(); over.wait()
    threads.append(Thread(target=work)); threads[-1].start(); freed.wait()
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) // 1024)
over.set()
"""


@pytest.mark.slow
def test_freed_memory_when_threads_share_heaps_then_kept_once_and_not_by_each_thread() -> None:
    kept = [
        int(
            subprocess.run([sys.executable, "-c", HOLD_FREED, *mode], capture_output=True, text=True, check=True).stdout
        )
        for mode in ([], ["share"])
    ]
    assert kept[1] < 80, kept  # MiB
    assert kept[0] > kept[1] + 24, kept


RETURN_PROGRAM = """
import re
from pathlib import Path
from tdserve.base.machine import keep_freed_memory, return_freed_memory

def count_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

keep_freed_memory()
blocks, kept = [], []
for number in range(200):
    blocks.append(b"1" * (1 << 20))
    kept.append(bytes(1 << 16))  # in use between blocks that are free, and behind them all
del blocks
before = count_mib()
return_freed_memory()
print(before - count_mib())
"""


def test_return_freed_memory_when_it_lies_between_what_is_in_use_then_the_kernel_gets_it() -> None:
    out = subprocess.run([sys.executable, "-c", RETURN_PROGRAM], capture_output=True, text=True, check=True).stdout
    assert int(out) > 150
