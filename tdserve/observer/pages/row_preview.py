"""The first rows of a store as numbers, histograms, pictures, text and chats. Read by a client when a viewer asks."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError, TooLargeError
from tdserve.cli.rows.first_rows import Column, compute_row_nbytes, read_first_columns
from tdserve.cli.rows.pictures import encode_png, find_pixels, to_array
from tdserve.cli.screen.chats import find_messages
from tdserve.cli.screen.render import escape_long, escape_unprintable, format_cell, format_key
from tdserve.rules.replay.settings import Settings

MAX_ROWS = 8

MAX_NBYTES = 32 << 20
"""Most content that is read for a page, as far as it is known beforehand."""

MAX_LEAVES = 64

MAX_TEXT = 2_000
"""Characters of a text or message."""

MAX_IMAGE_SIDE = 512

MAX_IMAGES = 512
"""Images that are kept for the browsers that are about to ask for them."""

MAX_PRIORITIES = 4_096
"""Rows whose priorities a histogram shows; of a longer table, rows at equal distances."""

NUM_BARS = 32

OpenClient = Callable[[], AbstractContextManager[Any]]


class RowPreviews:
    """Reads rows, one page at a time.

    Args:
        open_client: Opens a client of the server; it is closed after each page, so that no session stays.
    """

    def __init__(self, open_client: OpenClient) -> None:
        self._open_client = open_client
        self._turn = asyncio.Lock()
        self._images: OrderedDict[str, bytes] = OrderedDict()

    async def read(self, name: str) -> dict[str, Any]:
        """Returns what a page shows of a store. Raises TDServeError if it cannot be read."""
        async with self._turn:
            return await asyncio.to_thread(self._read, name)

    def find_image(self, number: str) -> bytes | None:
        """Returns an image that a page shows, if it is still there."""
        return self._images.get(number)

    def _read(self, name: str) -> dict[str, Any]:
        with self._open_client() as client:
            described = client.describe(name)
            num_rows = _choose_num_rows(described)
            _, columns = read_first_columns(client, name, num_rows)
            priorities = None
            if described.capacity and _has_priorities(described.settings):
                priorities = _read_priorities(client, name, described.num_rows)
        shown = [self._describe_column(column) for column in columns[:MAX_LEAVES]]
        return {"leaves": shown, "num_more": max(len(columns) - MAX_LEAVES, 0), "priorities": priorities}

    def _describe_column(self, column: Column) -> dict[str, Any]:
        path = column.path[0] if len(column.path) == 1 else column.path
        rows = [column.value[row] for row in range(len(column.value))] if column.is_per_row else [column.value]
        arrays = [array for row in rows[:MAX_ROWS] if (array := to_array(row)) is not None]
        return {
            "key": format_key(path),
            "type": escape_unprintable(column.type),
            "cells": [self._show(row) for row in rows[:MAX_ROWS]],
            "histogram": make_histogram(arrays),
        }

    def _show(self, value: Any) -> dict[str, Any]:
        array = to_array(value)
        pixels = None if array is None else find_pixels(array, max_side=MAX_IMAGE_SIDE)
        if pixels is not None:
            number = secrets.token_urlsafe(12)
            self._images[number] = encode_png(pixels)
            while len(self._images) > MAX_IMAGES:
                self._images.popitem(last=False)
            return {"image": number, "height": pixels.shape[0], "width": pixels.shape[1]}
        chat = find_chat(value)
        if chat is not None:
            return {"chat": chat}
        if isinstance(value, str):
            return {"text": shorten(value)}
        return {"cell": format_cell(value)}


def _choose_num_rows(described: Any) -> int:
    """Returns how many rows are read. Raises TooLargeError if even one is too much."""
    row_nbytes = compute_row_nbytes(described)
    if row_nbytes > MAX_NBYTES:
        raise TooLargeError(what=f"a preview of {described.name!r}", asked=int(row_nbytes), free=MAX_NBYTES)
    return int(max(min(MAX_ROWS, MAX_NBYTES // max(row_nbytes, 1)), 1))


def _has_priorities(text: str) -> bool:
    settings = Settings.from_json(text)
    return settings.uses_priority and not settings.is_queue  # a queue has no call for them


def _read_priorities(client: Any, name: str, num_rows: int) -> dict[str, Any] | None:
    """Returns a histogram with ``of_rows``, the number of all rows if it shows but some."""
    numbers = spread_evenly(num_rows)
    with suppress(TDServeError):
        found = make_histogram([np.asarray(client[name].get_priorities(numbers))])
        return found and {**found, "of_rows": f"{num_rows:,}" if len(numbers) < num_rows else ""}
    return None  # these rows are not all live


def spread_evenly(num_rows: int) -> NDArray[np.int64]:
    """Returns the numbers of at most ``MAX_PRIORITIES`` of a table's first rows, at equal distances, with the last."""
    if num_rows <= MAX_PRIORITIES:
        return np.arange(num_rows)
    spread: NDArray[np.int64] = np.linspace(0, num_rows - 1, MAX_PRIORITIES).round().astype(np.int64)
    return spread


def find_chat(value: Any) -> list[tuple[str, str]] | None:
    """Returns role and content of the messages of a chat; None if a value is not a chat."""
    messages = find_messages(value)
    return messages and [(shorten(role, 40), shorten(content)) for role, content in messages]


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text that can be shown: of limited length, with its lines, without other controls."""
    shown = "\n".join(escape_long(line) for line in text[:limit].split("\n"))
    return shown if len(text) <= limit else f"{shown}… ({len(text):,} characters)"


def make_histogram(arrays: Sequence[NDArray[Any]]) -> dict[str, Any] | None:
    """Returns the bars of a histogram of numbers; None of fewer than nine, or of what are no numbers."""
    numeric = [array for array in arrays if array.dtype.kind in "biuf"]
    values = np.concatenate([array.reshape(-1).astype(np.float64) for array in numeric]) if numeric else np.empty(0)
    finite = values[np.isfinite(values)]
    if len(finite) < 9:
        return None
    low, high = float(finite.min()), float(finite.max())
    if not np.isfinite(high - low) or high == low:
        return None
    counts, _ = np.histogram(finite, bins=NUM_BARS, range=(low, high))
    bars = [{"x": number, "height": round(40 * num / max(counts.max(), 1), 2)} for number, num in enumerate(counts)]
    return {
        "bars": bars,
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "mean": f"{finite.mean():.4g}",
        "num": f"{len(values):,}",
        "num_odd": len(values) - len(finite),
        "width": NUM_BARS,
    }
