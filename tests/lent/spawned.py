"""Runs what ``multiprocessing`` spawns in a process that has imported what workers of TorchRL's collectors need too.

``python -m tests.lent.spawned -c CODE ARGUMENTS`` does what ``python -c CODE ARGUMENTS`` does.
"""

from __future__ import annotations

from contextlib import suppress

from tests.lent.program import main

__all__ = ["main"]

with suppress(ImportError):
    import torchrl.collectors  # noqa: F401

    import tdserve.torchrl  # noqa: F401
