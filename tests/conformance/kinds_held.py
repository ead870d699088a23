"""Kinds that differ in how their content is stored: in files, in shared memory, with unusual strides, as views."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensordict import PersistentTensorDict, TensorDict, set_lazy_legacy

from tests.conformance.kind import ROWS, kind, numbers

_numbers = itertools.count()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder that lives as long as the process: HDF5 confuses a new file with an unlinked open one of the
    same inode number."""
    return tempfile.TemporaryDirectory()


def copied(td: Any) -> Any:
    """Returns the expected result: plain tensors in plain tensordicts, with the same locks."""
    found = td.apply(lambda leaf: leaf.as_subclass(torch.Tensor).clone().resolve_conj().resolve_neg().contiguous())
    return found.lock_() if td.is_locked else found


def whole(td: Any) -> Any:
    """Returns the expected result for views and files: a TensorDict."""
    return td.to_tensordict()


def example() -> TensorDict:
    """Leaves and a node."""
    return TensorDict({"x": numbers(ROWS, 3), "n": {"y": numbers(ROWS).long()}}, [ROWS])


@kind("memory-mapped", expected=copied)
def memory_mapped() -> Any:
    """In anonymous files."""
    return example().memmap()


@kind("consolidated", expected=copied)
def consolidated() -> Any:
    """In one block of memory."""
    return example().consolidate()


@kind("in shared memory", expected=copied)
def in_shared_memory() -> Any:
    """In shared memory, as for child processes."""
    return example().share_memory_()


@kind("strides of all kinds", expected=copied)
def strides() -> Any:
    """Transposed, expanded, with gaps, channels last, conjugate, negative, reversed."""
    return TensorDict(
        {
            "turned": numbers(3, ROWS).t(),
            "expanded": numbers(ROWS, 1).expand(ROWS, 5),
            "one row": numbers(3).expand(ROWS, 3),
            "gaps": numbers(3 * ROWS)[::3],
            "part": numbers(ROWS, 8)[:, 2:7:2],
            "channels last": numbers(ROWS, 2, 3, 4).to(memory_format=torch.channels_last),
            "conjugate": (numbers(ROWS) * (1 + 2j)).conj(),
            "negative": (numbers(ROWS) * (1 + 2j)).conj().imag,
            "reversed": numbers(ROWS).flip(0),
        },
        [ROWS],
    )


@kind("large leaves in any order", expected=copied)
def large_strides() -> Any:
    """Long enough to be sent in pieces."""
    turned = torch.arange(ROWS * 400_000, dtype=torch.int32).view(400_000, ROWS).t()
    return TensorDict(
        {"turned": turned, "expanded": numbers(ROWS, 1).expand(ROWS, 300_000), "x": numbers(ROWS)}, [ROWS]
    )


@kind("a sub-tensordict", expected=whole)
def sub_tensordict() -> Any:
    """Rows of another tensordict."""
    more = TensorDict({"x": numbers(2 * ROWS, 3), "n": {"y": numbers(2 * ROWS).long()}}, [2 * ROWS])
    return more._get_sub_tensordict(slice(0, 2 * ROWS, 2))


@kind("a lazy view", expected=whole)
def lazy_view() -> Any:
    """A lazy view, as with ``set_lazy_legacy(True)``."""
    td = TensorDict({"x": numbers(2, ROWS, 3), "n": TensorDict({"y": numbers(2, ROWS)}, [2, ROWS])}, [2, ROWS])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it goes with tensordict 0.17
        with set_lazy_legacy(True):
            return td.permute(1, 0)


@kind("in an HDF5 file", expected=whole)
def in_a_file() -> Any:
    """In a file that is read as it is sent."""
    make: Any = PersistentTensorDict
    content = TensorDict({"x": numbers(ROWS, 3), "n": {"y": numbers(ROWS).long()}}, [ROWS])
    return make.from_dict(content, Path(_folder().name) / f"{next(_numbers)}.h5")
