"""A store's non-tensor values as they are at one moment, for a copy of them."""

from __future__ import annotations

from pathlib import Path

from tdserve.store.database import environments
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.database.pinned_tree import PinnedTree
from tdserve.store.disk.faults import convert_os_errors, lmdb_faults


class PinnedValues:
    """Keeps the values until it is closed; the file grows meanwhile.

    Args:
        folder: As in ``object_folders.get_folder``.

    Raises:
        CorruptDataError: They cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = environments.acquire(folder, writable=False, max_bytes=0, is_checked_later=True)
        try:
            with convert_os_errors(folder), lmdb_faults(folder, max_bytes=0):
                self._tree = PinnedTree(self._environment.env, folder / DATA_FILE)
        except BaseException:
            environments.release(self._environment)
            raise

    def copy(self, folder: Path) -> int:
        """Writes an environment with only these values into a folder; it survives a loss of power.

        All pages are looked at before LMDB does so: at a damaged one it would end the process.

        Args:
            folder: Created here.

        Returns:
            Size of the file.

        Raises:
            CapacityError: The disk is full.
            CorruptDataError: A page is damaged, or the folder exists.
        """
        self._tree.check_pages()
        nbytes = (self._folder / DATA_FILE).stat().st_size
        with convert_os_errors(folder), lmdb_faults(folder, max_bytes=0, asked=nbytes):
            folder.mkdir()
            self._environment.write_copy(folder / DATA_FILE, self._tree.transaction)
            return (folder / DATA_FILE).stat().st_size

    def count_unused_bytes(self) -> int:
        """Returns the bytes of the file that no value takes; later values use them."""
        with convert_os_errors(self._folder):
            return self._tree.count_unused_bytes()

    def close(self) -> None:
        """Lets the values go."""
        self._tree.close()
        environments.release(self._environment)

    def __enter__(self) -> PinnedValues:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
