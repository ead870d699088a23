"""The possible states of a root after a loss of power: each page is from the last sync, or from the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tdserve.store.disk.checked_json import encode_checked

PAGE_BYTES = 4096

Choose = Callable[[str, int, int], bool]
"""Whether a page reached the disk, by the file's path below the root, the page's number and the file's number of
pages."""

_NOT_COPIED = ("control.sock", "tdserve.lock", "lock.mdb", "nonce")


def copy_root(root: Path, target: Path) -> None:
    """Copies a root as it is now."""
    shutil.copytree(root, target, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)


def compose(early: Path, late: Path, target: Path, reached: Choose) -> None:
    """Composes a root from two moments, as on a machine that was restarted since.

    Args:
        early: The content of the disk at the last sync.
        late: The content of the files when the power was lost.
        target: The root that is made.
        reached: Decides which pages of ``late`` had reached the disk.
    """
    names = {str(path.relative_to(base)) for base in (early, late) for path in base.rglob("*") if path.is_file()}
    for name in sorted(names):
        content = _mixed(name, _pages(early / name), _pages(late / name), reached)
        if content is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
    for name in ("catalog", "sessions", "stores"):
        (target / name).mkdir(exist_ok=True)
    run = target / "run.json"
    run.write_bytes(encode_checked({"boot_id": "of another start of the machine", "is_synced": False}))


def _pages(path: Path) -> list[bytes] | None:
    if not path.is_file():
        return None
    content = path.read_bytes()
    return [content[begin : begin + PAGE_BYTES] for begin in range(0, len(content), PAGE_BYTES)]


def _mixed(name: str, early: list[bytes] | None, late: list[bytes] | None, reached: Choose) -> bytes | None:
    if early is None or late is None:  # its name reached the disk, or its removal did
        is_late = reached(name, 0, 1)
        found = late if is_late else early
        return None if found is None else b"".join(found)
    num_pages = len(late)
    mixed = []
    for number, page in enumerate(late):
        old = early[number] if number < len(early) else b""
        mixed.append(page if reached(name, number, num_pages) else old[: len(page)].ljust(len(page), b"\0"))
    return b"".join(mixed)
