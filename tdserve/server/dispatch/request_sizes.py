"""How much memory a request takes besides its message: its answer, or what is drawn for it."""

from __future__ import annotations

from typing import Any

from tdserve.messages.content import MAX_SAMPLE_ROWS
from tdserve.rules.kv.entry_changes import MAX_KEY_BYTES
from tdserve.server.moves.leaving_stores import MAX_CONTENT_BYTES

ROW_BYTES = 24
"""Memory of a row that is drawn or read by number: its number and its generation, and once more in the order to a data
worker, of which most are encoded shorter."""

KEY_BYTES = 64
"""Memory of a key that a request names, besides its text."""

MAX_LISTED = 10_000
"""Most keys of one page (``tdserve.data.stored_entries``)."""

_BLOCK_STEPS = ("read", "read_frozen")


def count_extra_nbytes(kind: str, asked: Any, *, max_answer_nbytes: int) -> int:
    """Returns the bytes that a request may take, at most, besides its message and the answer to a small read.

    Args:
        kind: Its kind, and
        asked: its message.
        max_answer_nbytes: Counted at most for a page of keys, or of blocks, which every server must be able to send.
    """
    num_keys = len(getattr(asked, "keys", ()))
    if kind == "sample":
        return ROW_BYTES * min(int(asked.num_rows) * max(int(asked.num_batches), 1), MAX_SAMPLE_ROWS)
    if kind == "read":
        listed = sum(int(each.positions.nbytes_ahead) for each in asked.selection.items)
        return KEY_BYTES * num_keys + ROW_BYTES // 8 * listed
    if kind == "list" and not asked.asks_count:
        return min(MAX_KEY_BYTES * min(int(asked.page_size) or MAX_LISTED, MAX_LISTED), max_answer_nbytes)
    if kind in ("move", "checkpoint") and asked.WhichOneof("step") in _BLOCK_STEPS:
        return min(2 * MAX_CONTENT_BYTES, max_answer_nbytes)
    return KEY_BYTES * num_keys
