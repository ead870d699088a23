"""What a check has found, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdserve.base.errors import TDServeError
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.durability.environment_scan import EnvironmentScanner
from tdserve.store.roots.root import Root


@dataclass(frozen=True)
class Outcome:
    """What a repair has done.

    Attributes:
        done: What it has done, in words.
        losses: Content that it could not bring back, by store, beyond what the finding itself names.
        is_set_aside: Whether it has only moved what it found, which the next look at the root names where it is now.
    """

    done: str
    losses: Sequence[str] = ()
    is_set_aside: bool = False


Repair = Callable[[], str | Outcome]
"""Repairs one finding, and returns what it has done. It raises TDServeError if it cannot."""

REMOVED = "it was removed, and is made again"
"""What a repair has done that removed a file which the server makes from others."""

MAX_SHOWN_ROWS = 16
"""Most row numbers in the text of a finding; all of them are in its ``rows``."""


@dataclass(frozen=True)
class Finding:
    """One fault of a root.

    Attributes:
        path: The file, below the root.
        reason: What is wrong with it.
        store: The store that it belongs to; "" if to none.
        rows: Numbers of the rows that are damaged, if it concerns some.
        remedy: What to do, where it cannot be repaired.
        is_damage: Whether content is lost or unverified; otherwise it is a leftover that costs only space.
        repair: What ``--repair`` does; None if nothing can be done.
        repaired: What it has done; "" before, and if it could not.
        losses: Content that the repair could not bring back, by store.
        is_not_served: Whether it is all of a store, which is not in service.
        is_set_aside: Whether the repair has only moved it, and another finding names it where it is now.
    """

    path: str
    reason: str
    store: str = ""
    rows: Sequence[int] = ()
    remedy: str = ""
    is_damage: bool = True
    repair: Repair | None = field(default=None, compare=False)
    repaired: str = ""
    losses: Sequence[str] = ()
    is_not_served: bool = False
    is_set_aside: bool = False

    def describe(self) -> str:
        """Returns it as one line."""
        of = f"store {self.store!r}: " if self.store else ""
        shown = ", ".join(map(str, self.rows[:MAX_SHOWN_ROWS])) + (", ..." if len(self.rows) > MAX_SHOWN_ROWS else "")
        rows = f" ({len(self.rows)} rows: {shown})" if self.rows else ""
        end = f"; repaired: {self.repaired}" if self.repaired else f"; {self.remedy}" if self.remedy else ""
        end += f"; lost: {'; '.join(self.losses)}" if self.losses else ""
        return f"{of}{self.path}: {self.reason}{rows}{end}"

    def as_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        names = ("store", "path", "reason", "remedy", "repaired", "is_damage", "is_not_served")
        return {
            **{name: getattr(self, name) for name in names},
            "rows": list(map(int, self.rows)),
            "losses": list(self.losses),
        }


@dataclass
class Progress:
    """How far a check is.

    Attributes:
        num_stores: All stores.
        num_checked: Stores that are done.
        nbytes: Bytes that were read.
        store: The store that is being read.
        num_unsummed_rows, num_unsummed_versions: What was written since the last sync, and so has no checksum.
    """

    num_stores: int = 0
    num_checked: int = 0
    nbytes: int = 0
    store: str = ""
    num_unsummed_rows: int = 0
    num_unsummed_versions: int = 0


@dataclass
class CheckedRoot:
    """What every part of a check uses.

    Attributes:
        root: The root, which no server holds.
        db: Its catalog, only to be read.
        specs: Structures of the stores.
        changed: Files whose content is another than at the last orderly end, by path below the root.
        misleading: Files of LMDB of which one byte was found that has changed, and leads to an earlier state: they are
            read when it is put back.
        scanner: Reads environments of LMDB.
        progress: How far it is.
        show: Shows that.
    """

    root: Root
    db: CatalogDB
    specs: Specs
    changed: dict[str, str]
    misleading: set[str]
    scanner: EnvironmentScanner
    progress: Progress
    show: Callable[[Progress], None]

    def add_bytes(self, nbytes: int) -> None:
        """Counts bytes that were read, and shows them."""
        self.progress.nbytes += nbytes
        self.show(self.progress)

    def drop_changed_below(self, folder: Path) -> None:
        """Drops the changed files of a folder that a finding of its own names."""
        for name in [each for each in self.changed if each.startswith(f"{self.get_name(folder)}/")]:
            del self.changed[name]

    def get_name(self, path: Path) -> str:
        """Returns the path of a file below the root."""
        return str(path.relative_to(self.root.path))


def try_repair(repair: Repair) -> tuple[Outcome, str]:
    """Returns what a repair has done, and why it could not; one of them is empty."""
    try:
        done = repair()
    except TDServeError as error:
        return Outcome(""), str(error)
    return done if isinstance(done, Outcome) else Outcome(done), ""
