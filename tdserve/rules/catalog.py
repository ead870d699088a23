"""The records of all stores, in memory and sorted by name. The caller writes them to the disk."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from tdserve.base.errors import CorruptDataError, InvalidRequestError, StoreExistsError, StoreNotFoundError
from tdserve.base.ids import make_uid
from tdserve.base.integers import to_integer
from tdserve.messages.store_kinds import KIND_NUMBERS, QUEUE, describe_kind

Durability = Literal["process", "disk"]
DURABILITIES: tuple[Durability, ...] = get_args(Durability)
"""``process``: writes survive the end of any process, and those before the last sync a loss of power too. ``disk``:
writes also survive a loss of power."""

DEFAULT_MAX_OBJECT_BYTES = 1 << 30
"""Room for a million strings of a kilobyte. It costs address space only, of which a process has 128 TiB."""

IS_COMING = "a move has brought one, and is not over; repeat the call, or move a store to that server to end the move"
"""Why a name is taken by a store that is not visible yet."""

_OBJECT_BYTES_LIMITS = (1 << 20, 1 << 42)
_OBJECT_BYTES_STEP = 1 << 16
"""A multiple of every page size."""

_AFTER_FOLDER = "\0"
"""No path and no name contains it."""

_USUAL = "the default"
"""Text for a setting that the JSON leaves out."""

MAX_PAGE_SIZE = 10_000
"""Most names of one page: names of 200 bytes then take half of the 4 MiB that a gRPC message may have by default."""


@dataclass(frozen=True)
class StoreRecord:
    """The catalog's record of one store. State that changes with every write is kept elsewhere.

    Attributes:
        name: Its key.
        kind: Kind of the store.
        uid: Id of this incarnation; a store that was deleted and created again has another.
        fingerprint: Fingerprint of the spec: for a tensordict store, of what is stored; for a replay, of one row; for
            weights, empty before the first version.
        num_rows: Rows of the mapping: first batch dimension or 1, capacity of a replay, 0 for weights.
        capacity: Rows of a replay table, otherwise 0.
        nbytes: Size of all tensors.
        created_s: Seconds since the epoch.
        settings: Settings of a replay table, as canonical JSON; otherwise "".
        extra: Dotted paths of leaves in ``extra/``.
        loading: Whether its first content is still under way: it is invisible to other clients, and its name is taken.
        packed: Whether it has no files yet: its content is in the catalog until it is first used.
        max_object_bytes: Size limit of its non-tensor values; 0 takes the existing limit, or the default.
        share_non_tensor: Whether clients show the non-tensor leaves of a tensordict live.
        adopted: Absolute path of the user's folder with the tensors; "" if they are in the store's own.
        read_only: Whether every write is refused.
        structure: How often its structure has changed.
        order: Identifies the order of its keys among those with this fingerprint; "" is the first one seen.
        added_leaves: For a replay table: paths of the leaves that came after its creation. Rows that lack one have zero
            there.
        durability: What an acknowledged write survives, one of ``DURABILITIES``; "" is the default.
        checksum: Whether readers compare its rows with the checksums of the last sync.
        is_restored: Whether it came from a checkpoint, and was not asked for by its settings since.
        former_version: The last version of earlier stores of this name; those of this one follow it, so that a reader
            that knows one of theirs takes none of these for it.
    """

    name: str
    kind: str
    uid: str
    fingerprint: bytes = b""
    num_rows: int = 0
    capacity: int = 0
    nbytes: int = 0
    created_s: float = 0.0
    settings: str = ""
    extra: tuple[str, ...] = ()
    loading: bool = False
    packed: bool = False
    share_non_tensor: bool = False
    max_object_bytes: int = DEFAULT_MAX_OBJECT_BYTES
    adopted: str = ""
    read_only: bool = False
    structure: int = 0
    order: str = ""
    durability: str = "process"
    added_leaves: tuple[tuple[str, ...], ...] = ()
    is_restored: bool = False
    checksum: bool = False
    former_version: int = 0

    @property
    def shown_kind(self) -> str:
        """The kind that people see: a table whose rows are taken is a queue."""
        try:
            settings = json.loads(self.settings) if self.settings else None
        except ValueError:  # damaged: opening the store reports it
            settings = None
        return QUEUE if isinstance(settings, dict) and settings.get("is_queue") else self.kind

    def begin_incarnation(self, nbytes: int, *, former_version: int, loading: bool = False) -> StoreRecord:
        """Returns the record of a new store of this name; what was not asked for gets its default."""
        return dataclasses.replace(
            self,
            uid=make_uid(),
            former_version=former_version,
            created_s=time.time(),
            nbytes=nbytes,
            loading=loading,
            max_object_bytes=self.max_object_bytes or DEFAULT_MAX_OBJECT_BYTES,
            durability=self.durability or "process",
        )

    def with_files(self) -> StoreRecord:
        """Returns the record of this store once it is not packed any more."""
        return dataclasses.replace(self, packed=False)

    def to_bytes(self) -> bytes:
        """Returns the record for the disk: JSON without what is usual, equal for equal records."""
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if value != _DEFAULTS.get(name)}
        values["fingerprint"] = base64.b64encode(self.fingerprint).decode("ascii")
        # ASCII throughout: keys of leaves may be unicode that UTF-8 refuses
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreRecord:
        """Returns the record that :meth:`to_bytes` wrote.

        Raises:
            CorruptDataError: The bytes are not a record.
        """
        try:
            values = json.loads(data.decode())
            values["fingerprint"] = base64.b64decode(values["fingerprint"], validate=True)
            values["extra"] = tuple(values.get("extra", ()))
            values["added_leaves"] = tuple(map(tuple, values.get("added_leaves", ())))
            record = cls(**values)
            for name, value in values.items():
                if not _CHECKS.get(name, _is_text)(value):
                    raise CorruptDataError(path="catalog", expected=f"a record's {name}", actual=repr(value)[:100])
        except (ValueError, TypeError, KeyError, RecursionError) as fault:
            raise CorruptDataError(path="catalog", expected="a store record", actual=repr(data[:100])) from fault
        return record


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(StoreRecord)}


class Catalog:
    """The records of all stores, by name.

    Args:
        records: Records from the disk.

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
        self._kinds = Counter(record.shown_kind for record in self._records.values() if not record.loading)
        self._names = {record.uid: record.name for record in self._records.values()}
        self._coming: dict[str, str] = {}  # incarnations that moves have brought, by name
        self._folders = sorted(_make_folder_key(record) for record in self._records.values() if record.adopted)

    def __len__(self) -> int:
        return len(self._visible)

    def __contains__(self, name: object) -> bool:
        return name in self._records and not self._records[str(name)].loading

    def __iter__(self) -> Iterator[StoreRecord]:
        """Yields all records, loading ones too, in no order."""
        return iter(tuple(self._records.values()))

    def __repr__(self) -> str:
        return f"<Catalog {len(self._visible)} stores, {len(self._records) - len(self._visible)} loading>"

    def add(self, record: StoreRecord) -> None:
        """Adds a store.

        Raises:
            StoreExistsError: The name is taken, perhaps by a store that is still loading. Nothing was changed.
        """
        self.check_free(record.name, uid=record.uid)
        self.forget_coming(record)
        self._records[record.name] = record
        self._names[record.uid] = record.name
        if record.adopted:
            insort(self._folders, _make_folder_key(record))
        if not record.loading:
            self._show(record)

    def expect(self, record: StoreRecord) -> None:
        """Keeps the name of a store that a move has brought, until it is added: the other server may have released it,
        so a store that took the name would be in the place of the only one that there is."""
        self._coming[record.name] = record.uid

    def forget_coming(self, record: StoreRecord) -> None:
        """Gives the name of a store free that a move has brought, and will not show."""
        if self._coming.get(record.name) == record.uid:
            del self._coming[record.name]

    def check_free(self, name: str, *, uid: str = "") -> None:
        """Raises StoreExistsError if a store has this name, perhaps one that is still loading, or another incarnation
        than this comes from another server."""
        if self._coming.get(name, uid) != uid:
            raise StoreExistsError(name=name, reason=IS_COMING)
        present = self._records.get(name)
        if present is not None:
            raise StoreExistsError(
                name=name, **({"reason": "it is being created, or removed"} if present.loading else {})
            )

    def find(self, name: str) -> StoreRecord | None:
        """Returns the record of a visible store; None if there is none."""
        record = self._records.get(name)
        return None if record is None or record.loading else record

    def replace(self, record: StoreRecord) -> None:
        """Replaces the record of a store; if the new one is not ``loading``, the store becomes visible.

        Raises:
            StoreNotFoundError: There is no such store, or it is another incarnation. Nothing was changed.
        """
        before = self._records.get(record.name)
        if before is None or before.uid != record.uid:
            raise StoreNotFoundError(name=record.name)
        self._records[record.name] = record
        if before.loading and not record.loading:
            self._show(record)
        elif record.loading and not before.loading:
            self._hide(before)

    def remove(self, name: str) -> StoreRecord:
        """Removes a store, also one that is loading, and returns its record.

        Raises:
            StoreNotFoundError: There is none. Nothing was changed.
        """
        record = self._records.pop(name, None)
        if record is None:
            raise StoreNotFoundError(name=name)
        self._names.pop(record.uid, None)
        if record.adopted:
            del self._folders[bisect_left(self._folders, _make_folder_key(record))]
        if not record.loading:
            self._hide(record)
        return record

    def _show(self, record: StoreRecord) -> None:
        insort(self._visible, record.name)
        self._kinds[record.shown_kind] += 1

    def _hide(self, record: StoreRecord) -> None:
        del self._visible[bisect_left(self._visible, record.name)]
        self._kinds[record.shown_kind] -= 1

    def count_kinds(self) -> dict[str, int]:
        """Returns the number of visible stores of each ``shown_kind`` of which there are any."""
        return dict(+self._kinds)

    def find_name(self, uid: str) -> str | None:
        """Returns the name of the store of this incarnation, loading or not; None if there is none."""
        return self._names.get(uid)

    def is_taken(self, name: str) -> bool:
        """Returns whether a store has this name, even one that is still loading, or comes from another server."""
        return name in self._records or name in self._coming

    def get(self, name: str, *, with_loading: bool = False) -> StoreRecord:
        """Returns the record of a store.

        Raises:
            StoreNotFoundError: There is none, or it is loading and ``with_loading`` is False.
        """
        record = self._records.get(name)
        if record is None or (record.loading and not with_loading):
            raise StoreNotFoundError(name=name)
        return record

    def find_overlapping(self, folder: str) -> list[StoreRecord]:
        """Returns the stores that were adopted from a folder, from one below it or from one above it, loading ones too.

        Args:
            folder: Absolute and without symlinks.
        """
        prefixes = [
            _make_folder_prefix(folder),
            *(_make_folder_prefix(str(above)) + _AFTER_FOLDER for above in PurePosixPath(folder).parents),
        ]
        found = []
        for prefix in prefixes:
            begin = bisect_left(self._folders, prefix)
            keys = self._folders[begin : _end_of_prefix(self._folders, prefix, begin)]
            found += [self._records[key.rpartition(_AFTER_FOLDER)[2]] for key in keys]
        return found

    def list_page(self, prefix: str = "", *, after: str = "", size: int = 0) -> tuple[list[str], str]:
        """Returns a page of names, sorted by code point.

        Args:
            prefix: Prefix of the names.
            after: The last name of the previous page, which need not exist any more; ``""`` for the first page.
            size: Most names; 0 is the limit of 10,000.

        Returns:
            Names, and the ``after`` of the next page; ``""`` if this was the last.

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

    def find_names_around(self, name: str, size: int) -> list[str]:
        """Returns at most ``size`` names around one, in order; including itself if it is visible.

        Raises:
            InvalidRequestError: ``size`` is negative.
        """
        if size < 0:
            raise InvalidRequestError(argument="page size", reason=f"{size} is negative")
        return self._visible[
            _find_slice_around(bisect_left(self._visible, name), min(size, MAX_PAGE_SIZE), len(self._visible))
        ]


def _make_folder_prefix(folder: str) -> str:
    """Returns the common prefix of the keys of a folder and of all folders below it."""
    return folder.rstrip("/") + "/"


def _make_folder_key(record: StoreRecord) -> str:
    """Returns the sort key of an adopted store, its folder and name: all stores below a folder are neighbours."""
    return f"{_make_folder_prefix(record.adopted)}{_AFTER_FOLDER}{record.name}"


def _find_slice_around(begin: int, size: int, total: int) -> slice:
    """Returns a slice of ``size`` places, or all there are, with the given one in the middle if possible."""
    first = max(min(begin - size // 2, total - size), 0)
    return slice(first, first + size)


def check_max_object_bytes(asked: int | None) -> int:
    """Returns the limit for a store when a client asks for this one; 0 or None asks for none, and returns 0.

    Raises:
        InvalidRequestError: It is too small to hold anything, or larger than an address space.
    """
    low, high = _OBJECT_BYTES_LIMITS
    if not asked:
        return 0
    number = to_integer(asked)
    if number is None or not low <= number <= high:
        raise InvalidRequestError(
            argument="max_object_bytes", reason=f"{asked!r} is not an integer from {low} to {high}"
        )
    return -(-number // _OBJECT_BYTES_STEP) * _OBJECT_BYTES_STEP


def check_durability(asked: str | None) -> str:
    """Returns the durability for a store when a client asks for this one; "" or None asks for none, and returns "".

    Raises:
        InvalidRequestError: There is no such durability.
    """
    if not asked or asked in DURABILITIES:
        return asked or ""
    raise InvalidRequestError(
        argument="durability", reason=f"it must be one of {', '.join(DURABILITIES)}, got {asked!r}"
    )


_UNCHOSEN = frozenset(("owner", "copy_at", "revision"))
"""Of a record of a shared store: which record, or copy, it is."""


def explain_difference(existing: StoreRecord, asked: StoreRecord) -> str | None:
    """Returns why an existing store is not the requested one (``exists_ok``), whatever its structure; ``None`` if it
    is."""
    if existing.shown_kind != asked.shown_kind:
        return f"it is {describe_kind(existing.shown_kind)}, asked is {describe_kind(asked.shown_kind)}"
    if existing.capacity != asked.capacity:
        return f"its capacity is {existing.capacity}, asked is {asked.capacity}"
    if existing.settings != asked.settings:
        others = _list_other_settings(existing.settings, asked.settings)
        if others:
            return others
    if asked.max_object_bytes not in (0, existing.max_object_bytes):
        return f"its max_object_bytes is {existing.max_object_bytes}, asked is {asked.max_object_bytes}"
    if asked.durability not in ("", existing.durability):
        return f"its durability is {existing.durability!r}, asked is {asked.durability!r}"
    if asked.checksum and not existing.checksum:
        return "it was created without checksum=True"
    return None


def _list_other_settings(existing: str, asked: str) -> str:
    """Returns the names of the settings in which two tables, or records of shared stores, differ; "" if only what no
    caller has chosen does."""
    mine, theirs = _name_settings(existing), _name_settings(asked)
    all_names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    names = [name for name in all_names if name not in _UNCHOSEN]
    others = [name for name in names if name.endswith(".kind")]
    parts = tuple(name.removesuffix("kind") for name in others)
    named = [*others, *(name for name in names if not name.startswith(parts or ("\0",)))]
    differences = [
        f"its {name.removesuffix('.kind')} is {mine.get(name, _USUAL)}, asked is {theirs.get(name, _USUAL)}"
        for name in named
    ]
    return "; ".join(differences) or ("" if all_names else f"its settings are {existing}, asked are {asked}")


def _name_settings(text: str) -> dict[str, str]:
    """Returns the settings of a canonical JSON, each by its part and name."""
    found: dict[str, str] = {}
    for part, value in (json.loads(text) if text else {}).items():
        fields = {f"{part}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {part: value}
        found |= {name: each if isinstance(each, str) else json.dumps(each) for name, each in fields.items()}
    return found


def make_identity(uid: str, structure: int) -> str:
    """Returns a text that names an incarnation of a store and one of the structures that it has had."""
    return f"{uid}.{structure}"


def explain_read_only(adopted: str) -> str:
    """Returns the reason of a ReadOnlyError for an adopted folder."""
    return f"it was adopted with read_only=True from {adopted}; delete it and adopt it again to write"


def _end_of_prefix(names: list[str], prefix: str, begin: int) -> int:
    """Returns the end of the names that begin with a prefix; they are neighbours, so a binary search finds it."""
    return bisect_left(names, True, lo=begin, key=lambda name: not name.startswith(prefix))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("num_rows", "capacity", "nbytes", "max_object_bytes", "structure", "former_version"), _is_count),
    **dict.fromkeys(("loading", "packed", "share_non_tensor", "read_only", "is_restored", "checksum"), _is_flag),
    "kind": KIND_NUMBERS.__contains__,
    "durability": frozenset(("", *DURABILITIES)).__contains__,
    "extra": lambda value: all(map(_is_text, value)),
    "added_leaves": lambda value: all(_is_text(part) for path in value for part in path),
    "created_s": lambda value: type(value) in (int, float),
    "fingerprint": lambda value: isinstance(value, bytes),
}
"""Whether a value fits a field of a record; fields that are not named here are text."""
