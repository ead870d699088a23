"""Writes to live rows, which are recorded before they are applied, so that a crash after that can be repaired.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import json

import numpy as np

from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import Selection, from_message
from tdserve.v1 import control_pb2

JOURNAL = b"apply:"
"""Prefix of the key, in front of a store's uid; a store has one record, of the write that is being applied to it."""


class Journal:
    """The record of a write that must be applied."""

    def __init__(
        self,
        client_id: bytes,
        request: int,
        done: control_pb2.Done,
        asked: control_pb2.WriteRequest,
        staging: str,
    ) -> None:
        self.client_id = client_id
        self.request = request
        self.done = done
        self.asked = asked
        self.staging = staging

    def to_bytes(self) -> bytes:
        head = {"client": self.client_id.hex(), "request": self.request, "staging": self.staging}
        done = self.done.SerializeToString()
        head_bytes = json.dumps({**head, "done_nbytes": len(done)}).encode()
        return head_bytes + b"\n" + done + self.asked.SerializeToString()

    @classmethod
    def from_bytes(cls, content: bytes) -> Journal:
        head_bytes, _, rest = content.partition(b"\n")
        head = json.loads(head_bytes)
        done = control_pb2.Done.FromString(rest[: head["done_nbytes"]])
        asked = control_pb2.WriteRequest.FromString(rest[head["done_nbytes"] :])
        return cls(bytes.fromhex(head["client"]), head["request"], done, asked, head["staging"])

    @property
    def selection(self) -> Selection:
        """The selection that is written."""
        return from_message(self.asked.selection)

    def is_applied(self, rows: RowSet, generations: np.ndarray, content_version: int) -> bool:
        """Returns whether the write was applied to its last step before a crash, as far as the store shows.

        Applying it again does no harm, but makes another version.
        """
        return content_version >= self.done.version and not any(
            (generations[piece] & 1).any() for piece in rows.iter_pieces()
        )
