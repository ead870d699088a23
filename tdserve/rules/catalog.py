"""Which stores there are: their records, in memory and sorted by name. Writing them down is the caller's."""

from __future__ import annotations

import base64
import dataclasses
import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from tdserve.base.errors import CorruptDataError, InvalidRequestError, StoreExistsError, StoreNotFoundError
from tdserve.base.integers import integer_of

StoreKind = Literal["tensordict", "replay", "weights"]

Durability = Literal["process", "disk"]
DURABILITIES: tuple[Durability, ...] = get_args(Durability)
"""``process``: the end of any process, and what was written before the last sync a loss of power too. ``disk``: also a
loss of power."""

DEFAULT_MAX_OBJECT_BYTES = 1 << 30
"""A million strings of a kilobyte. Costs address space only, of which a process has 128 TiB."""

_OBJECT_BYTES_LIMITS = (1 << 20, 1 << 42)
_OBJECT_BYTES_STEP = 1 << 16
"""A multiple of every page size."""

OTHER_STRUCTURE = "its structure differs"
"""What ``matches`` says where only the structures themselves tell more."""

_AFTER_FOLDER = "\0"
"""No path and no name has it."""

_USUAL = "the default"
"""Of a setting that the JSON leaves out."""

MAX_PAGE_SIZE = 10_000
"""Names of one page at most: with names of 200 bytes half of the 4 MiB that a gRPC message may have by default."""


@dataclass(frozen=True)
class StoreRecord:
    """What the catalog knows of one store. What changes with every write is kept elsewhere.

    Attributes:
        name: Its key.
        kind: How it is used.
        uid: Of this incarnation; one that was deleted and created again has another.
        fingerprint: Of the spec: tensordict as stored, replay of one row, weights empty before the first version.
        num_rows: Rows of the mapping: first batch dimension or 1, capacity of a replay, 0 for weights.
        capacity: Rows of a replay table, else 0.
        nbytes: Of all tensors.
        created_s: Seconds since the epoch.
        settings: Of a replay table, canonical JSON, else "".
        extra: Leaves that lie in ``extra/``, dotted.
        loading: Created, but its first content is still under way: nobody else sees it, its name is taken.
        version: Content version of a tensordict, raised by every write of the whole.
        max_object_bytes: Size that its non-tensor values may grow to; 0 asks for whatever there is, or the default.
        share_non_tensor: Whether clients show the non-tensor leaves of a tensordict live.
        adopted: The user's folder that the tensors lie in, absolute; "" when they lie in the store's own.
        read_only: Whether every write is refused.
        structure: How many times its structure has changed.
        order: Names the order of its keys among those with this fingerprint; "" is the first that came.
        durability: What a write that was acknowledged survives, one of ``DURABILITIES``; "" is no wish.
    """

    name: str
    kind: StoreKind
    uid: str
    fingerprint: bytes = b""
    num_rows: int = 0
    capacity: int = 0
    nbytes: int = 0
    created_s: float = 0.0
    settings: str = ""
    extra: tuple[str, ...] = ()
    loading: bool = False
    version: int = 0
    share_non_tensor: bool = False
    max_object_bytes: int = DEFAULT_MAX_OBJECT_BYTES
    adopted: str = ""
    read_only: bool = False
    structure: int = 0
    order: str = ""
    durability: str = "process"

    def to_bytes(self) -> bytes:
        """The record for the disk: JSON, equal for equal records."""
        values = {**dataclasses.asdict(self), "fingerprint": base64.b64encode(self.fingerprint).decode("ascii")}
        # ASCII throughout: keys of leaves may be unicode that UTF-8 refuses
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreRecord:
        """The record that :meth:`to_bytes` wrote.

        Raises:
            CorruptDataError: The bytes are no record.
        """
        try:
            values = json.loads(data)
            fingerprint = base64.b64decode(values["fingerprint"], validate=True)
            record = cls(**{**values, "fingerprint": fingerprint, "extra": tuple(values["extra"])})
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise CorruptDataError(path="catalog", expected="a store record", actual=repr(data[:100])) from fault
        for field in dataclasses.fields(cls):
            value = getattr(record, field.name)
            if not _fits(field.name, value):
                raise CorruptDataError(path="catalog", expected=f"a record's {field.name}", actual=repr(value)[:100])
        return record


class Catalog:
    """The records of all stores, by name.

    Args:
        records: Those that were written down.

    Raises:
        StoreExistsError: Two records have one name.
    """

    def __init__(self, records: Iterable[StoreRecord] = ()) -> None:
        self._records: dict[str, StoreRecord] = {}
        for record in records:
            if record.name in self._records:
                raise StoreExistsError(name=record.name, reason="two records have this name")
            self._records[record.name] = record
        self._visible = sorted(name for name, record in self._records.items() if not record.loading)
        self._names = {record.uid: record.name for record in self._records.values()}
        self._folders = sorted(_folder_key(record) for record in self._records.values() if record.adopted)

    def __len__(self) -> int:
        return len(self._visible)

    def __contains__(self, name: object) -> bool:
        return name in self._records and not self._records[str(name)].loading

    def __iter__(self) -> Iterator[StoreRecord]:
        """All records, loading ones too, in no order."""
        return iter(tuple(self._records.values()))

    def __repr__(self) -> str:
        return f"<Catalog {len(self._visible)} stores, {len(self._records) - len(self._visible)} loading>"

    def add(self, record: StoreRecord) -> None:
        """Takes a store in.

        Raises:
            StoreExistsError: The name is taken, maybe by a store that is still loading. Nothing was changed.
        """
        present = self._records.get(record.name)
        if present is not None:
            raise StoreExistsError(name=record.name, **({"reason": "it is being created"} if present.loading else {}))
        self._records[record.name] = record
        self._names[record.uid] = record.name
        if record.adopted:
            insort(self._folders, _folder_key(record))
        if not record.loading:
            insort(self._visible, record.name)

    def replace(self, record: StoreRecord) -> None:
        """Changes the record of a store; one that ends ``loading`` becomes visible.

        Raises:
            StoreNotFoundError: There is no such store, or it is another incarnation. Nothing was changed.
        """
        before = self._records.get(record.name)
        if before is None or before.uid != record.uid:
            raise StoreNotFoundError(name=record.name)
        self._records[record.name] = record
        if before.loading and not record.loading:
            insort(self._visible, record.name)
        elif record.loading and not before.loading:
            del self._visible[bisect_left(self._visible, record.name)]

    def remove(self, name: str) -> StoreRecord:
        """Takes a store out, loading ones too, and returns its record.

        Raises:
            StoreNotFoundError: There is none. Nothing was changed.
        """
        record = self._records.pop(name, None)
        if record is None:
            raise StoreNotFoundError(name=name)
        self._names.pop(record.uid, None)
        if record.adopted:
            del self._folders[bisect_left(self._folders, _folder_key(record))]
        if not record.loading:
            del self._visible[bisect_left(self._visible, name)]
        return record

    def name_of(self, uid: str) -> str | None:
        """The name of the store of this incarnation, loading or not; None when there is none."""
        return self._names.get(uid)

    def is_taken(self, name: str) -> bool:
        """Whether a store has this name, maybe one that is still loading."""
        return name in self._records

    def get(self, name: str, *, with_loading: bool = False) -> StoreRecord:
        """The record of a store.

        Raises:
            StoreNotFoundError: There is none, or it is loading and ``with_loading`` is not said.
        """
        record = self._records.get(name)
        if record is None or (record.loading and not with_loading):
            raise StoreNotFoundError(name=name)
        return record

    def overlapping(self, folder: str) -> list[StoreRecord]:
        """Stores that were adopted from a folder, from one below it or from one above it, loading ones too.

        Args:
            folder: Absolute and without symlinks.
        """
        prefixes = [_below(folder), *(_below(str(above)) + _AFTER_FOLDER for above in PurePosixPath(folder).parents)]
        found = []
        for prefix in prefixes:
            begin = bisect_left(self._folders, prefix)
            keys = self._folders[begin : _end_of_prefix(self._folders, prefix, begin)]
            found += [self._records[key.rpartition(_AFTER_FOLDER)[2]] for key in keys]
        return found

    def page(self, prefix: str = "", *, after: str = "", size: int = 0) -> tuple[list[str], str]:
        """A page of names, sorted by code point.

        Args:
            prefix: Names begin with it.
            after: The last name of the page before; it need not exist any more. ``""`` begins.
            size: Names at most; 0 is the most there may be, 10,000.

        Returns:
            Names, and the ``after`` of the next page; ``""`` when this was the last.

        Raises:
            InvalidRequestError: ``size`` is negative.
        """
        if size < 0:
            raise InvalidRequestError(argument="page size", reason=f"{size} is negative")
        size = min(size or MAX_PAGE_SIZE, MAX_PAGE_SIZE)
        begin = bisect_left(self._visible, prefix)
        end = _end_of_prefix(self._visible, prefix, begin)
        if after:
            begin = max(begin, bisect_right(self._visible, after))
        names = self._visible[begin : min(begin + size, end)]
        return names, names[-1] if names and begin + size < end else ""

    def names_around(self, name: str, size: int) -> list[str]:
        """So many names at most around one, in their order; itself if it is visible.

        Raises:
            InvalidRequestError: ``size`` is negative.
        """
        if size < 0:
            raise InvalidRequestError(argument="page size", reason=f"{size} is negative")
        return self._visible[_around(bisect_left(self._visible, name), min(size, MAX_PAGE_SIZE), len(self._visible))]


def _below(folder: str) -> str:
    """What the paths of a folder and of all below it begin with."""
    return folder.rstrip("/") + "/"


def _folder_key(record: StoreRecord) -> str:
    """The folder of an adopted store, and its name: sorted, those below a folder follow one another."""
    return f"{_below(record.adopted)}{_AFTER_FOLDER}{record.name}"


def _around(begin: int, size: int, total: int) -> slice:
    """So many places, or all there are, with one of them in the middle where that can be."""
    first = max(min(begin - size // 2, total - size), 0)
    return slice(first, first + size)


def checked_max_object_bytes(asked: int | None) -> int:
    """The limit that a store gets when a client asks for this one; 0 or None is no wish, and gives 0.

    Raises:
        InvalidRequestError: It is too small to hold anything, or larger than an address space.
    """
    low, high = _OBJECT_BYTES_LIMITS
    if not asked:
        return 0
    number = integer_of(asked)
    if number is None or not low <= number <= high:
        raise InvalidRequestError(
            argument="max_object_bytes", reason=f"{asked!r} is not an integer from {low} to {high}"
        )
    return -(-number // _OBJECT_BYTES_STEP) * _OBJECT_BYTES_STEP


def checked_durability(asked: str | None) -> str:
    """What a store gets when a client asks for this; "" or None is no wish, and gives "".

    Raises:
        InvalidRequestError: There is no such durability.
    """
    if not asked or asked in DURABILITIES:
        return asked or ""
    raise InvalidRequestError(argument="durability", reason=f"{asked!r} is none of {', '.join(DURABILITIES)}")


def matches(existing: StoreRecord, asked: StoreRecord) -> str | None:
    """Why an existing store is not the one that was asked for with ``exists_ok``; ``None`` when it is."""
    if existing.kind != asked.kind:
        return f"it is a {existing.kind} store, asked is {asked.kind}"
    if existing.kind != "weights" and existing.fingerprint != asked.fingerprint:
        return OTHER_STRUCTURE
    if existing.capacity != asked.capacity:
        return f"its capacity is {existing.capacity}, asked is {asked.capacity}"
    if existing.settings != asked.settings:
        return _other_settings(existing.settings, asked.settings)
    if asked.max_object_bytes not in (0, existing.max_object_bytes):
        return f"its max_object_bytes is {existing.max_object_bytes}, asked is {asked.max_object_bytes}"
    if asked.durability not in ("", existing.durability):
        return f"its durability is {existing.durability!r}, asked is {asked.durability!r}"
    return None


def _other_settings(existing: str, asked: str) -> str:
    """Which settings of a table differ, by their names."""
    mine, theirs = _named_settings(existing), _named_settings(asked)
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    others = [name for name in names if name.endswith(".kind")]
    parts = tuple(name.removesuffix("kind") for name in others)
    named = [*others, *(name for name in names if not name.startswith(parts or ("\0",)))]
    told = [
        f"its {name.removesuffix('.kind')} is {mine.get(name, _USUAL)}, asked is {theirs.get(name, _USUAL)}"
        for name in named
    ]
    return "; ".join(told) or f"its settings are {existing}, asked are {asked}"


def _named_settings(text: str) -> dict[str, str]:
    """The settings of a canonical JSON, each by its part and name."""
    found: dict[str, str] = {}
    for part, value in (json.loads(text) if text else {}).items():
        fields = {f"{part}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {part: value}
        found |= {name: each if isinstance(each, str) else json.dumps(each) for name, each in fields.items()}
    return found


def why_read_only(adopted: str) -> str:
    """The reason of a ReadOnlyError, by the folder that was adopted."""
    return f"it was adopted with read_only=True from {adopted}; delete it and adopt it again to write"


def _end_of_prefix(names: list[str], prefix: str, begin: int) -> int:
    """Where the names that begin with a prefix end: they stand together, so halving finds it."""
    return bisect_left(names, True, lo=begin, key=lambda name: not name.startswith(prefix))


def _fits(field: str, value: Any) -> bool:
    if field == "kind":
        return value in get_args(StoreKind)
    if field == "durability":
        return value in ("", *DURABILITIES)
    if field == "extra":
        return all(isinstance(part, str) for part in value)
    if field in ("num_rows", "capacity", "nbytes", "version", "max_object_bytes", "structure"):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if field == "created_s":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if field in ("loading", "share_non_tensor", "read_only"):
        return isinstance(value, bool)
    return isinstance(value, bytes if field == "fingerprint" else str)
