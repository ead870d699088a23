"""The machine of the figures: without it they mean nothing."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

GIB = 1 << 30

Fact = str | int | float


def describe_machine(root: Path) -> dict[str, Fact]:
    """Returns cores, memory, versions, and how busy the machine was when the run began.

    Args:
        root: Where the stores lie; its file system is named.
    """
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _read_processor(),
        "memory_gib": round(memory_nbytes / GIB, 1),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "tensordict": _read_version("tensordict"),
        "tdserve": _read_version("tdserve"),
        "root": str(root),
        "file_system": _find_file_system(root),
    }


def _read_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read_processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _find_file_system(folder: Path) -> str:
    """Returns the type of the mount with the longest path above ``folder``."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(path), kind) for _, path, kind, *_ in mounts if folder.resolve().is_relative_to(path))[1]
