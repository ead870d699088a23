"""What the catalog has of a store, in a file of the store's own folder: for a catalog that has lost the store.

Each pass of the syncing process writes it if it has changed. It is a copy, with a checksum of itself, and not synced:
after a loss of power the copy of the whole catalog counts.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.checked_json import decode_checked, encode_checked
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX

FILE_NAME = "record.json"

MAX_DRAW_BYTES = 1 << 20
"""Most bytes of the draws that a table keeps. They change with each step, so that each pass writes them again."""


@dataclass(frozen=True)
class KeptSpec:
    """A structure that a store uses.

    Attributes:
        fingerprint, order: By which the record or the state names it.
        content: As in the catalog.
    """

    fingerprint: bytes
    order: str
    content: bytes


@dataclass(frozen=True)
class KeptRecord:
    """What the catalog had of a store.

    Attributes:
        record: The record of the store.
        state: What its rules had saved; b"" for nothing.
        specs: Its structures.
        draws: Keys and records of the draws that a table keeps; None if they are larger than ``MAX_DRAW_BYTES``.
        moment: Number of the pass that has first found all this; 0 in records of an earlier tdserve.
    """

    record: bytes
    state: bytes
    specs: tuple[KeptSpec, ...]
    draws: tuple[tuple[bytes, bytes], ...] | None = ()
    moment: int = 0

    def save(self, folder: Path) -> None:
        """Writes it into a store's folder, unless it is there. Raises TDServeError."""
        path = folder / FILE_NAME
        specs = [[each.fingerprint.hex(), each.order, base64.b64encode(each.content).decode()] for each in self.specs]
        draws = (
            None if self.draws is None else [[key.hex(), base64.b64encode(each).decode()] for key, each in self.draws]
        )
        fields: dict[str, Any] = {
            "record": self.record.decode(),
            "state": self.state.decode(),
            "specs": specs,
            "draws": draws,
        }
        fields |= {"moment": self.moment} if self.moment else {}
        content = encode_checked(fields)
        with convert_os_errors(path, asked=len(content)):
            if path.exists() and path.read_bytes() == content:
                return
            fresh = path.with_name(FILE_NAME + FRESH_SUFFIX)
            fresh.write_bytes(content)
            os.replace(fresh, path)

    @classmethod
    def load(cls, folder: Path) -> KeptRecord | None:
        """Returns what a store's folder has; None if it has none. Raises CorruptDataError if it is damaged."""
        path = folder / FILE_NAME
        with convert_os_errors(path):
            if not path.exists():
                return None
            found = decode_checked(path.read_bytes(), str(path))
        try:
            specs = [KeptSpec(bytes.fromhex(key), order, base64.b64decode(spec)) for key, order, spec in found["specs"]]
            draws = found.get("draws", [])  # of an earlier tdserve: none
            if draws is not None:
                draws = tuple((bytes.fromhex(key), base64.b64decode(draw)) for key, draw in draws)
            moment = int(found.get("moment", 0))
            return cls(found["record"].encode(), found["state"].encode(), tuple(specs), draws, moment)
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            raise CorruptDataError(path=str(path), expected="the record of a store", actual=repr(fault)) from fault
