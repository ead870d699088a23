"""A plugin with which TorchRL's own tests run over a server.

``TDServeStorage`` stands for its lazy storages, ``TDServeWeightSyncScheme`` for ``MultiProcessWeightSyncScheme``. In
the folder ``test`` of TorchRL's repository, with tdserve's in ``PYTHONPATH``, once with ``-p`` and once without::

    python -m pytest -p tests.torchrl_suite rb test_collectors.py

A storage is replaced where its arguments mean something to a table: a size, one dimension, the CPU. ``tdserve guide
torchrl`` lists what differs, with reasons.
"""

from __future__ import annotations

import importlib
import itertools
import os
from abc import ABCMeta
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import tdserve
from tdserve.torchrl import TDServeStorage, TDServeWeightSyncScheme
from tdserve.torchrl.table_rows import from_table

_BUFFERS = "torchrl.data.replay_buffers"
_STORAGES = (f"{_BUFFERS}.storages.tensor", f"{_BUFFERS}.storages", _BUFFERS, "torchrl.data")
_SCHEMES = ("torchrl.weight_update._mp", "torchrl.weight_update")
"""Modules: the first defines a class, from the others the tests import it."""

_numbers = itertools.count()


class _StandIn(ABCMeta):
    """Metaclass of the names that the tests see instead of a class of TorchRL, ``original``."""

    original: Any
    replace: Callable[..., Any]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "original" not in cls.__dict__:  # a subclass that a test has defined
            return super().__call__(*args, **options)
        made = cls.replace(*args, **options)
        return cls.original(*args, **options) if made is None else made

    def __instancecheck__(cls, instance: Any) -> bool:
        if "original" not in cls.__dict__:
            return super().__instancecheck__(instance)
        return isinstance(instance, (cls.original, TDServeWeightSyncScheme))


class ShownStorage(TDServeStorage):
    """A storage that shows its rows where TorchRL's tests look for them: all places, zeros where no row is live."""

    @property
    def _storage(self) -> Any:
        table = self.table
        if table is None:
            return None
        rows, index, _ = table.read_numbered()
        shown = torch.zeros_like(rows[:1]).expand(self.max_size, *rows.shape[1:]).clone()
        shown[index] = rows
        return from_table(shown)


def _replace_storage(*args: Any, **options: Any) -> TDServeStorage | None:
    max_size = args[0] if args else options.pop("max_size", None)
    fits = options.pop("ndim", 1) == 1 and str(options.pop("device", "cpu")) in ("cpu", "auto", "None")
    if not fits or options or len(args) > 1 or max_size is None:
        return None
    return ShownStorage(max_size, name=f"suite-{os.getpid()}-{next(_numbers)}")


def _replace_scheme(**options: Any) -> TDServeWeightSyncScheme:
    return TDServeWeightSyncScheme(None, f"suite-{os.getpid()}-{next(_numbers)}", **options)


def _show(name: str, home: str, *shown: str, replace: Callable[..., Any]) -> None:
    """Replaces a name in the modules that show it. Pickles find both classes: each is in a module of its own."""
    original = getattr(importlib.import_module(home), name)
    original.__module__ = home
    members = {"original": original, "replace": staticmethod(replace), "__module__": shown[0]}
    stand_in = _StandIn(name, (original,), members)
    for module in map(importlib.import_module, shown):
        setattr(module, name, stand_in)


def pytest_configure(config: pytest.Config) -> None:
    """Starts a server, which every process of the tests finds through its environment, and replaces the names."""
    folder = TemporaryDirectory(prefix="tdserve-suite-", ignore_cleanup_errors=True)
    server = tdserve.Server(folder.name).start()
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(server.shutdown)
    os.environ["TDSERVE_ADDRESS"] = server.address
    for storage in ("LazyTensorStorage", "LazyMemmapStorage"):
        _show(storage, *_STORAGES, replace=_replace_storage)
    _show("MultiProcessWeightSyncScheme", *_SCHEMES, replace=_replace_scheme)


@pytest.fixture(autouse=True)
def _no_tables_of_others() -> Iterator[None]:
    """Deletes the stores of a test when it ends."""
    yield
    with tdserve.connect() as client:
        for name in client.stores():
            client.delete(name)
