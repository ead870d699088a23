"""Opens stores in a thread where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tdserve.rules.catalog import StoreRecord
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.store_kind import KindStores
from tdserve.server.open_store.opened_store import OpenedStore


class LongOpening:
    """A store whose rules a thread is restoring. Nothing else has it open meanwhile, so nothing in it changes.

    Args:
        record: Record of the store.
        make: Restores the rules, which takes long; reads only files of the store.
        finish: Opens the store with the rules, on the event loop.
    """

    def __init__(self, record: StoreRecord, make: Callable[[], Any], finish: Callable[[Any], OpenedStore]) -> None:
        self.record = record
        self._finish = finish
        self._made: Future[Any] = Future()
        asyncio.get_running_loop().run_in_executor(None, self._make, make)

    def _make(self, make: Callable[[], Any]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as fault:  # noqa: BLE001 (``store`` raises it)
            self._made.set_exception(fault)

    async def wait(self) -> None:
        """Waits until the thread has ended, with or without an error. Callers resume in the order of their calls."""
        await asyncio.wait({asyncio.wrap_future(self._made)})

    async def outlast(self) -> None:
        """Like ``wait``, but a caller that is cancelled still waits to the end: the thread is reading the files."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            await self.wait()
            raise

    def get_store(self) -> OpenedStore:
        """Returns the open store; call it once. Blocks the event loop if the thread is not done.

        Raises:
            CorruptDataError: Its files are damaged.
        """
        return self._finish(self._made.result())


def begin_opening(record: StoreRecord, stores: KindStores) -> LongOpening:
    """Starts to open a store in a thread. Raises CorruptDataError."""
    return LongOpening(record, *KINDS[record.kind].split_opening(record, stores))


async def open_new(record: StoreRecord, stores: KindStores) -> OpenedStore:
    """Opens a store that is not visible yet, in a thread if that takes long. Raises CorruptDataError."""
    kind = KINDS[record.kind]
    if not kind.is_long_to_open(record):
        return kind.open(record, stores)
    opening = begin_opening(record, stores)
    await opening.outlast()
    return opening.get_store()
