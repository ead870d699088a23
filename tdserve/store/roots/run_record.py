"""The record of a server's run in its root: whether it has ended in order, and in which boot of the machine it was.

``server/README.md`` has reading orders of recovery and syncs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tdserve.base.errors import CorruptDataError, TDServeError
from tdserve.base.machine import read_boot_id
from tdserve.store.disk.checked_json import decode_checked, encode_checked
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import replace_file, sync_file
from tdserve.store.roots.file_sums import record_sums

_RUN_FILE = "run.json"
_RUN_BYTES = 128
"""Size of the file. It never changes, so it can be written on a full disk."""


class RunRecord:
    """The record of the last run of a server in a root. Threads: one at a time writes.

    Args:
        root: Folder of the root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / _RUN_FILE

    def has_lost_power(self) -> bool:
        """Returns whether the machine was restarted since a server ran here that did not end in an orderly way: any
        part of what it had written may be missing."""
        try:
            last = self._read()
            return not last["is_synced"] and last["boot_id"] != read_boot_id()
        except FileNotFoundError:
            return False
        except (CorruptDataError, KeyError):  # an incomplete file is one of these parts
            return True

    def has_ended_in_order(self) -> bool:
        """Returns whether the last server here has synced everything at its end."""
        try:
            return bool(self._read()["is_synced"])
        except (FileNotFoundError, CorruptDataError, KeyError):
            return False

    def check(self) -> None:
        """Raises CorruptDataError if the record is there and damaged."""
        with contextlib.suppress(FileNotFoundError):
            self._read()

    def note(self, *, is_synced: bool) -> None:
        """Records on the disk in which boot of the machine a server runs.

        Args:
            is_synced: Whether everything that it has written is on the disk, and nothing more will be written.
        """
        self._write({"boot_id": read_boot_id(), "is_synced": is_synced})

    def note_orderly_end(self) -> None:
        """Records that all is on the disk and that nothing more will be written, with the checksums of files."""
        with contextlib.suppress(TDServeError):  # `tdserve check` then has none to compare
            record_sums(self._root)
        self.note(is_synced=True)

    def note_lost_power(self) -> None:
        """Makes the next recovery take the state of the last sync, as after a loss of power."""
        self._write({"boot_id": "", "is_synced": False})

    def _read(self) -> dict[str, Any]:
        return decode_checked(self._path.read_bytes(), str(self._path))

    def _write(self, fields: dict[str, Any]) -> None:
        content = encode_checked(fields)
        with convert_os_errors(self._root):
            replace_file(self._path, content.ljust(_RUN_BYTES), must_sync=True)
            sync_file(self._root)
