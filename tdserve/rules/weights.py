"""Decides which versions of published weights exist, counts their readers, and chooses files to recycle. No I/O.

Life of a version: begun -> committed (kept, readable) -> retired (beyond the last K) -> pooled once it has no reader ->
recycled as the file of a later version, or dropped. A version gets its number when it is committed, so numbers follow
one another however many publishes are cut short, and none is ever reused.

It also keeps the checksums of the leaves of the last versions, once they were computed, so that a reader that has one
of these versions gets only the leaves that differ.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from tdserve.base.errors import CorruptDataError, InvalidRequestError, VersionNotFoundError, WrongStateError
from tdserve.base.ids import make_uid
from tdserve.base.integers import check_integer

DEFAULT_KEEP = 2
"""The newest, and the one before it for readers that still need it when the newest appears."""

MAX_METADATA_BYTES = 1 << 20
"""Metadata are small values, such as the number of a step; the catalog has those of all kept versions."""

MIN_COMPARED_BYTES = 1024 * 1024
"""Smaller versions are sent whole: that takes less time than to find their unchanged leaves."""

MAX_CHECKSUMMED = 8
"""Versions whose checksums are kept: a reader further behind gets everything."""

MIN_SHARE = 1 / 8
"""Share of a version that must be unchanged: verifying it costs the reader about a third of receiving it."""

PATIENCE = 4
"""Consecutive versions with a smaller unchanged share, or with a successor before it was known, after which later ones
are compared less often."""

MAX_PASSED_OVER = 64
"""Most versions between two comparisons: it may take that long to notice that most leaves stay unchanged."""


STEP_AFTER_LOSS = 1_000_000
"""Step of version numbers after a loss of power, and in what is restored from a checkpoint: no client has published so
many since the last known version."""


@dataclass(frozen=True)
class VersionRecord:
    """One committed version.

    Attributes:
        version: Its number, from 1 upwards.
        nbytes: Size of its tensors.
        created_s: When it became visible, seconds since the epoch.
        metadata: The publisher's, opaque.
        fingerprint: Fingerprint of its structure; a file is recycled only for an equal one.
        order: Names the order of its keys among those with this fingerprint.
    """

    version: int
    nbytes: int
    created_s: float
    metadata: bytes
    fingerprint: bytes
    order: str = ""


@dataclass(frozen=True, eq=False)
class UnfinishedVersion:
    """A version that is being written, and has no number yet.

    Attributes:
        name: Names its file until then; no other version ever has it, so a publisher that was stopped, and continues
            after a restart, spoils no other version.
        recycles: Retired version whose file becomes this one's, or ``None`` for a fresh file.
        fingerprint: Fingerprint of its structure.
        drops: Versions whose files the caller deletes: pooled ones of another structure.
        order: Names the order of its keys among those with this fingerprint.
    """

    name: str
    recycles: int | None
    fingerprint: bytes
    drops: tuple[int, ...]
    order: str = ""


@dataclass(frozen=True)
class VersionChecksums:
    """Checksums of the leaves of one version.

    Attributes:
        fingerprint: Fingerprint of its structure.
        content: Opaque checksums of equal length per leaf, in canonical order.
    """

    fingerprint: bytes
    content: bytes


class Versions:
    """Decides for one weights store.

    Without readers, every publish from number ``keep + 2`` on recycles a file. Methods that return *drops* name
    versions whose files, if there are any, the caller deletes.

    Args:
        keep: Committed versions that stay readable, at least 1.

    Attributes:
        fanout: Number of clients to which each end sends a version at once, if clients pass it on; 0 leaves that to the
            server.
        wants_checksums: Whether there are readers that could use them.
        is_mostly_unchanged: Whether the last compared version had at least half of the one before it.
    """

    def __init__(self, keep: int = DEFAULT_KEEP) -> None:
        self._keep = _check_keep(keep)
        self._last = 0
        self._open: set[UnfinishedVersion] = set()
        self._kept: dict[int, VersionRecord] = {}  # ascending by version
        self._held: dict[int, bytes] = {}  # retired, still read: fingerprint
        self._pool: dict[int, bytes] = {}  # retired, free: fingerprint, longest retired first
        self._num_readers: dict[int, int] = {}
        self._checksums: dict[int, VersionChecksums] = {}  # ascending by version
        self.fanout = 0
        self.wants_checksums = False
        self.is_mostly_unchanged = False
        self._num_in_vain = 0
        self._next_checksummed = 0

    def __repr__(self) -> str:
        return f"<Versions {list(self._kept)} kept, {list(self._held)} held by readers, {list(self._pool)} to recycle>"

    @property
    def keep(self) -> int:
        """Committed versions that stay readable."""
        return self._keep

    @property
    def newest(self) -> VersionRecord | None:
        """The committed version with the highest number, ``None`` before the first."""
        return self._kept[next(reversed(self._kept))] if self._kept else None

    @property
    def kept(self) -> tuple[VersionRecord, ...]:
        """Readable versions, ascending."""
        return tuple(self._kept.values())

    @property
    def files(self) -> tuple[int, ...]:
        """Every version that has a file; after a crash the caller deletes all others."""
        recycled = [each.recycles for each in self._open if each.recycles is not None]
        return tuple(sorted({*self._kept, *self._held, *self._pool, *recycled}))

    @property
    def last_number(self) -> int:
        """The highest number that was given, or skipped."""
        return self._last

    @property
    def next_number(self) -> int:
        """The number of the version that is committed next."""
        return self._last + 1

    @property
    def structures(self) -> set[tuple[bytes, str]]:
        """Returns fingerprint and key order of every version that is readable, or being written."""
        several: tuple[VersionRecord | UnfinishedVersion, ...] = (*self._kept.values(), *self._open)
        return {(each.fingerprint, each.order) for each in several}

    @property
    def is_unused(self) -> bool:
        """Whether nothing was ever committed, and nothing is being written."""
        return not (self._kept or self._open)

    def count_readers(self, version: int) -> int:
        """Returns the number of readers that acquired the version and did not release it."""
        return self._num_readers.get(version, 0)

    def skip(self, last: int) -> None:
        """Skips the numbers up to this one: an earlier store had them."""
        self._last = max(self._last, last)

    def begin(self, *, fingerprint: bytes, order: str = "") -> UnfinishedVersion:
        """Begins a version."""
        recycles = next((version for version, has in self._pool.items() if has == fingerprint), None)
        if recycles is not None:
            del self._pool[recycles]
        # A changed structure seldom changes back: files that cannot be recycled now only fill the disk.
        drops = tuple(version for version, has in self._pool.items() if has != fingerprint)
        for version in drops:
            del self._pool[version]
        publishing = UnfinishedVersion(make_uid(), recycles, fingerprint, drops, order)
        self._open.add(publishing)
        return publishing

    def commit(
        self, publishing: UnfinishedVersion, now_s: float, *, nbytes: int, metadata: bytes = b""
    ) -> tuple[int, ...]:
        """Makes a version the newest, numbered :attr:`next_number`, and retires those beyond the last K.

        If two are written at once, the one that is whole later is the newer, whichever began first.

        Returns:
            Drops.

        Raises:
            WrongStateError: It was committed or aborted before. Nothing was changed.
        """
        self._close(publishing, "committing")
        self._last = version = self.next_number
        record = VersionRecord(version, nbytes, now_s, metadata, publishing.fingerprint, publishing.order)
        self._kept[version] = record
        return self._retire()

    def abort(self, publishing: UnfinishedVersion) -> tuple[int, ...]:
        """Abandons a version. Its own file, which :attr:`UnfinishedVersion.name` names, is deleted too.

        Returns:
            Drops: the version that it recycled, whose file may or may not have been renamed yet.

        Raises:
            WrongStateError: It was committed or aborted before. Nothing was changed.
        """
        self._close(publishing, "aborting")
        return () if publishing.recycles is None else (publishing.recycles,)

    def set_keep(self, keep: int) -> tuple[int, ...]:
        """Changes how many versions stay readable.

        Returns:
            Drops.

        Raises:
            InvalidRequestError: ``keep`` is below 1. Nothing was changed.
        """
        self._keep = _check_keep(keep)
        return self._retire()

    def get(self, version: int) -> VersionRecord:
        """Returns a readable version.

        Raises:
            VersionNotFoundError: It is not kept (any more), or was never committed.
        """
        record = self._kept.get(version)
        if record is None:
            kept = ", ".join(map(str, self._kept)) or "none"
            raise VersionNotFoundError(argument="version", reason=f"{version} is not kept; kept now: {kept}")
        return record

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """A block whose changes are undone if it raises."""
        before = {name: copy(value) for name, value in vars(self).items()}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def acquire(self, version: int) -> VersionRecord:
        """Like :meth:`get`; also keeps its file unchanged until :meth:`release`."""
        record = self.get(version)
        self._num_readers[version] = self._num_readers.get(version, 0) + 1
        return record

    def hold(self, version: int) -> bool:
        """Like ``acquire``, for a version that may be retired; returns False, and does nothing, if it has no file."""
        if version in self._pool:
            self._held[version] = self._pool.pop(version)
        if version not in self._kept and version not in self._held:
            return False
        self._num_readers[version] = self._num_readers.get(version, 0) + 1
        return True

    def release(self, version: int) -> tuple[int, ...]:
        """Ends one :meth:`acquire` or :meth:`hold`.

        Returns:
            Drops.

        Raises:
            WrongStateError: This version has no reader. Nothing was changed.
        """
        if not self._num_readers.get(version):
            raise WrongStateError(state=f"version {version} has no readers", event="releasing it")
        self._num_readers[version] -= 1
        if self._num_readers[version]:
            return ()
        del self._num_readers[version]
        if version not in self._held:
            return ()
        self._pool[version] = self._held.pop(version)
        return self._trim()

    def set_checksums(self, version: int, content: bytes) -> bool:
        """Keeps the checksums of a version's leaves; returns False, and changes nothing, if the version is not kept any
        more."""
        record = self._kept.get(version)
        if record is None:
            return False
        self._checksums[version] = VersionChecksums(record.fingerprint, content)
        self._checksums = dict(sorted(self._checksums.items())[-MAX_CHECKSUMMED:])
        return True

    def is_worth_checksums(self, version: int) -> bool:
        """Returns whether a version should get checksums: all do, until those of several in a row were useless."""
        return version >= self._next_checksummed

    def note_unchanged(self, version: int, before: int, *, share: float) -> None:
        """Notes which share of a version's bytes the version ``before`` had too.

        If it is too small time after time, as when a whole network is trained, checksums are wasted work just when
        readers come: more and more versions are passed over between two that are compared.
        """
        self.is_mostly_unchanged = share >= 0.5
        if share >= MIN_SHARE:
            self._num_in_vain = self._next_checksummed = 0
        elif before >= self._next_checksummed:
            self._note_in_vain(version)

    def note_superseded(self, version: int) -> None:
        """Notes that a version had a successor before its checksums were made, and so gets none.

        If that happens time after time, they are wasted work too, and slow down the publishes and pulls of a fast
        sequence of versions. The exception is if most leaves stay unchanged: then readers wait for them.
        """
        if not self.is_mostly_unchanged:
            self._note_in_vain(version)

    def _note_in_vain(self, version: int) -> None:
        self._num_in_vain += 1
        num_passed_over = min(2 ** max(self._num_in_vain - PATIENCE, 0), MAX_PASSED_OVER)
        self._next_checksummed = version + num_passed_over if self._num_in_vain >= PATIENCE else 0

    def get_checksums(self, version: int) -> VersionChecksums | None:
        """Returns the checksums of a version, which may be retired by now; None if they are not known."""
        return self._checksums.get(version)

    def find_checksums_before(self, version: int) -> tuple[int, VersionChecksums] | None:
        """Returns the last version before this one whose checksums are known, and its checksums."""
        return next((each for each in reversed(self._checksums.items()) if each[0] < version), None)

    def get_state(self) -> dict[str, Any]:
        """Returns all that a restart needs, as JSON values."""
        free = {**self._held, **self._pool}
        return {
            "keep": self._keep,
            "fanout": self.fanout,
            "last_begun": self._last,  # roots of earlier versions have this name for it
            "kept": [
                [
                    record.version,
                    record.nbytes,
                    record.created_s,
                    _encode_text(record.metadata),
                    _encode_text(record.fingerprint),
                ]
                for record in self._kept.values()
            ],
            "orders": [[record.version, record.order] for record in self._kept.values() if record.order],
            "free": [[version, _encode_text(fingerprint)] for version, fingerprint in free.items()],
            "checksums": [
                [version, _encode_text(each.fingerprint), _encode_text(each.content)]
                for version, each in self._checksums.items()
            ],
        }

    def rename_orders(self, names: Mapping[tuple[bytes, str], str]) -> None:
        """Gives the orders of keys other names, by fingerprint and earlier name: another server has learnt them."""
        for number, record in self._kept.items():
            self._kept[number] = replace(record, order=names[record.fingerprint, record.order])

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Versions:
        """Restores versions. Readers are gone with the server; versions that were not committed do not exist.

        After a crash between a rename and the record of the state, a file to recycle may be missing: then a fresh one
        replaces it. Files of versions that are not in :attr:`files` are leftovers.

        Raises:
            CorruptDataError: The state is not one of :meth:`get_state`.
        """
        try:
            versions = cls(state["keep"])
            versions.fanout = int(state.get("fanout", 0))
            versions._last = int(state["last_begun"])
            orders = {number: str(order) for number, order in state.get("orders", ())}
            for number, nbytes, created_s, metadata, fingerprint in sorted(state["kept"]):
                content = _decode_text(metadata), _decode_text(fingerprint), orders.get(number, "")
                versions._kept[number] = VersionRecord(number, nbytes, created_s, *content)
            versions._pool = {number: _decode_text(fingerprint) for number, fingerprint in state["free"]}
            for number, fingerprint, content in sorted(state.get("checksums", ())):
                versions._checksums[number] = VersionChecksums(_decode_text(fingerprint), _decode_text(content))
        except (KeyError, TypeError, ValueError) as fault:
            raise CorruptDataError(
                path="state of versions", expected="a state", actual=str(dict(state))[:200]
            ) from fault
        if max((0, *versions._kept, *versions._pool)) > versions._last or versions._kept.keys() & versions._pool:
            raise CorruptDataError(
                path="state of versions", expected="numbers used once", actual=str(dict(state))[:200]
            )
        return versions

    def _close(self, publishing: UnfinishedVersion, event: str) -> None:
        if publishing not in self._open:
            raise WrongStateError(state=f"version {publishing.name} is closed", event=f"{event} it")
        self._open.remove(publishing)

    def _retire(self) -> tuple[int, ...]:
        while len(self._kept) > self._keep:
            version = next(iter(self._kept))
            fingerprint = self._kept.pop(version).fingerprint
            (self._held if version in self._num_readers else self._pool)[version] = fingerprint
        return self._trim()

    def _trim(self) -> tuple[int, ...]:
        """Drops free files: more than the versions that could need one at once are a waste of disk."""
        drops = []
        while len(self._pool) > self._keep + 1:
            version = next(iter(self._pool))
            del self._pool[version]
            drops.append(version)
        return tuple(drops)


def check_metadata(metadata: bytes) -> None:
    """Raises InvalidRequestError if a version's metadata are too long for the catalog."""
    if len(metadata) > MAX_METADATA_BYTES:
        reason = (
            f"it takes {len(metadata)} bytes, at most {MAX_METADATA_BYTES} may; put large things into the tensordict"
        )
        raise InvalidRequestError(argument="metadata", reason=reason)


def _check_keep(keep: int) -> int:
    return check_integer("keep", keep, 1)


def _encode_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
