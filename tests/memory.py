"""How much memory objects keep, measured from outside: for tests that nothing piles up."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np

SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Not an object's own: they are there once, whoever refers to them."""


def count_bytes(*roots: object) -> int:
    """Returns the size of these objects and of all that they keep alive, each once; classes and code do not count."""
    todo, seen, num_bytes = list(roots), set[int](), 0
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, SHARED):
            seen.add(id(each))
            num_bytes += sys.getsizeof(each)
            todo += gc.get_referents(each)
            if isinstance(each, np.ndarray):  # which the garbage collector does not look into
                todo.append(each.base)
    return num_bytes


def read_private_bytes(pid: int) -> int:
    """Returns the memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
