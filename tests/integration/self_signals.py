"""Signals that a client program sends to itself in the middle of an access to shared memory.

A writer is struck when it is about to touch leaf number N of the mapped store (from 0; rows have three), or after the
last leaf, before anything is acknowledged. The file of a version is filled at once: N is 0 before the file is made, 1
before it is filled, 2 before it is sealed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tdserve.client.local import local_claim, local_reads
from tdserve.client.transfers import placing as _placing
from tdserve.data import mapped_stores as _mapped_stores
from tdserve.store.weights.versions import VersionFile
from tdserve.transport import sources_sinks

BEHIND = 3
"""The place of a strike after all leaves of a row were touched."""

claims: Any = local_claim
placing: Any = _placing
opened: Any = _mapped_stores
versions: Any = VersionFile


def strike(number: int) -> None:
    """Sends a signal to the calling thread: if another thread received it, this one would continue for a moment."""
    signal.pthread_kill(threading.get_ident(), number)


class Struck:
    """Counts the leaves that are touched, and strikes once, at one of them."""

    def __init__(self, at: int, number: int) -> None:
        self.at = at
        self.number = number
        self.num_touched = 0

    def touch(self) -> None:
        """Call it before another leaf is touched."""
        if self.num_touched == self.at:
            strike(self.number)
        self.num_touched += 1

    def watched(self, store: Any) -> Any:
        """Wraps a mapped store so that every access to a leaf is counted."""
        return _WatchedStore(store, self)


class _WatchedStore:
    def __init__(self, store: Any, struck: Struck) -> None:
        self._store = store
        self._struck = struck
        self.leaves = _WatchedLeaves(store.leaves, struck)

    def get_table(self, path: Any) -> Any:
        self._struck.touch()
        return self._store.get_table(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _WatchedLeaves:
    def __init__(self, leaves: Mapping[Any, Any], struck: Struck) -> None:
        self._leaves = leaves
        self._struck = struck

    def __getitem__(self, path: Any) -> Any:
        self._struck.touch()
        return self._leaves[path]

    def __len__(self) -> int:
        return len(self._leaves)

    def keys(self) -> Any:
        return self._leaves.keys()


def strike_in_place(at: int, number: int) -> None:
    """Strikes, once, while the content of the next writes is put in place."""
    put_rows, put_selection, put_version = placing.put_rows, placing.put_selection, placing.put_version
    fill_rows = claims.fill_rows
    create, seal = versions.create, versions.seal
    struck = Struck(at, number)

    def watching_rows(store: Any, *arguments: Any, **named: Any) -> Any:
        written = put_rows(struck.watched(store), *arguments, **named)
        struck.touch()
        return written

    def watching_claimed_rows(store: Any, *arguments: Any, **named: Any) -> Any:
        written = fill_rows(struck.watched(store), *arguments, **named)
        struck.touch()
        return written

    def watching_selection(store: Any, *arguments: Any, **named: Any) -> Any:
        put_selection(struck.watched(store), *arguments, **named)
        struck.touch()

    def watching_version(*arguments: Any) -> Any:
        struck.touch()
        put_version(*arguments)
        struck.touch()

    def creating(*arguments: Any, **named: Any) -> Any:
        made = create(*arguments, **named)
        struck.touch()
        return made

    def sealing(file: VersionFile) -> None:
        struck.touch()
        seal(file)

    placing.put_rows = watching_rows
    claims.fill_rows = watching_claimed_rows
    placing.put_selection = watching_selection
    placing.put_version = watching_version
    versions.create = creating
    versions.seal = sealing


def strike_in_opening(number: int) -> None:
    """Strikes, once, in the middle of the next mapping of a store: its generations are open, its tensors are not."""
    open_leaves = opened.open_leaves

    def striking(*arguments: Any, **named: Any) -> Any:
        opened.open_leaves = open_leaves
        strike(number)
        return open_leaves(*arguments, **named)

    opened.open_leaves = striking


def strike_in_copy(number: int) -> None:
    """Strikes, once, in the middle of the next read, after the first leaf was copied and before the check."""
    is_struck = False

    def once() -> None:
        nonlocal is_struck
        if not is_struck:
            is_struck = True
            strike(number)

    def striking(copying: Callable[..., Any]) -> Callable[..., Any]:
        def copies(*arguments: Any) -> Any:
            found = copying(*arguments)
            once()
            return found

        return copies

    for owner, name in ((local_reads, "copy_tensor"), (sources_sinks.RowBuffers, "gather")):
        setattr(owner, name, striking(getattr(owner, name)))
