from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tdserve.machine import boot_id, pid_namespace

TOLD = "from tdserve.machine import boot_id, pid_namespace; print(boot_id(), pid_namespace())"


def test_ids_when_of_two_processes_of_one_machine_then_equal() -> None:
    told = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True).stdout.split()
    assert told == [boot_id(), pid_namespace()]
    assert len(boot_id()) == 36


def test_pid_namespace_when_another_then_differs_and_the_machine_is_the_same() -> None:
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", TOLD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("a pid namespace of its own needs root")
    boot, namespace = done.stdout.split()
    assert boot == boot_id()
    assert namespace not in (pid_namespace(), "")


def test_ids_when_there_is_no_proc_then_empty() -> None:
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" -c "$1"', sys.executable]
    told = "from tdserve.machine import boot_id, pid_namespace; print([boot_id(), pid_namespace()])"
    done = subprocess.run([*command, told], capture_output=True, text=True, check=False, cwd=os.getcwd())
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("to hide /proc needs root")
    assert done.stdout.strip() == "['', '']", done.stderr


@pytest.mark.parametrize("keeps", [True, False])
def test_keep_freed_memory_when_much_is_freed_then_its_pages_stay(keeps: bool) -> None:
    lines = [
        "from tdserve.machine import keep_freed_memory",
        "keep_freed_memory()" if keeps else "",
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096",
        "before = resident()",
        "content = b'x' * (24 << 20)",
        "del content",
        "print(resident() - before)",
    ]
    told = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert (int(told) > 20 << 20) == keeps
