"""Decides which rows are too old: how many versions of a policy were published since the one that made them.

The *lag* of a row is the newest published version minus the row's own, numbers that were skipped not counted. Version 0
is the state before the first one. Rows of a policy that was deleted have no lag: they are older than any limit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.content import POLICY_VERSION_KEY
from tdserve.messages.row_numbers import Rows, sort_unique
from tdserve.rules.replay.eligibility.skipped_versions import SkippedVersions
from tdserve.rules.replay.row_indexes.columns import RowColumns

UNKNOWN = -1
"""Version of rows whose policy does not exist any more."""

LARGEST_VERSION = (1 << 40) - 1

_NUMBERS_PER_POLICY = LARGEST_VERSION + 1
"""The column has, for version v of the table's k-th policy, ``k * _NUMBERS_PER_POLICY + v``: when another policy takes
its place, all rows are older than its versions, and none has to be visited."""

_MIN_ROOM = 64

_CHUNK_ROWS = 4096


class Lags(NamedTuple):
    """The ages of rows, in versions."""

    min: int
    mean: float
    max: int


class Staleness:
    """The versions of a table's rows, and the rows that a largest lag lets through.

    Rows that may be drawn lie in buckets by version: rows that become too old are found without visiting the others.
    The cost is that of the rows that change. Memory: up to 32 bytes per row of capacity.

    Args:
        columns: RowColumns of the table.
        uid: The incarnation of the policy's store that the rows' versions belong to; "" if there was none.
        num_former: Policies that the table had before this one.
        num_discarded: Its stored value.
        newest: The newest version that was known.
        remote_since_s: As the attribute.
        gaps: Gaps of :class:`SkippedVersions`.

    Attributes:
        newest: The newest published version, 0 before the first.
        uid, num_former: As above, now.
        num_discarded: Rows that left the table because they were too old.
        remote_since_s: When the policy's store was created, seconds since the epoch, if it is on another server:
            then the table has what its clients have reported last. None if it is on this one, or nowhere.
    """

    def __init__(
        self,
        columns: RowColumns,
        *,
        uid: str = "",
        num_former: int = 0,
        num_discarded: int = 0,
        newest: int = 0,
        remote_since_s: float | None = None,
        gaps: Sequence[Sequence[int]] = (),
    ) -> None:
        self._numbers: NDArray[np.int64] = np.asarray(columns.get_array(POLICY_VERSION_KEY, np.int64))
        self._chunk_rows = min(max(columns.capacity // 4, _MIN_ROOM), _CHUNK_ROWS)
        # One more than the place of each row in its bucket; 0: it is no member.
        self._places: Rows = np.zeros(columns.capacity, np.int64)
        self._buckets: dict[int, _VersionBucket] = {}
        self._ordered: list[int] = []  # the numbers that have a bucket
        self._sum = 0  # of the known versions of all members
        self.newest = newest
        self._skipped = SkippedVersions(gaps)
        self.remote_since_s = remote_since_s
        self.uid = uid
        self.num_former = num_former
        self.num_discarded = num_discarded

    @classmethod
    def restore(cls, columns: RowColumns, state: Mapping[str, Any]) -> Staleness:
        """Restores it from what :meth:`get_state` returned; from nothing for a new table."""
        return cls(
            columns,
            uid=str(state.get("policy_uid", "")),
            num_former=int(state.get("num_former_policies", 0)),
            num_discarded=int(state.get("num_discarded", 0)),
            newest=int(state.get("newest_policy_version", 0)),
            remote_since_s=state.get("policy_elsewhere_since_s"),
            gaps=state.get("skipped_policy_versions", ()),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the state that the columns do not have and a restart needs."""
        return {
            "policy_uid": self.uid,
            "num_former_policies": self.num_former,
            "num_discarded": self.num_discarded,
            "newest_policy_version": self.newest,
            "policy_elsewhere_since_s": self.remote_since_s,
            "skipped_policy_versions": self._skipped.gaps,
        }

    def __repr__(self) -> str:
        return f"<Staleness of {self.count(UNKNOWN)} rows of {len(self._ordered)} versions, newest {self.newest}>"

    def follow(self, uid: str, newest: int, former: int = 0) -> bool:
        """Takes over the state of the policy.

        Args:
            uid: Incarnation of its store; "" if there is none.
            newest: Its newest version, 0 if there is none.
            former: The last version of earlier policies of its name, which its own follow; 0 if it is not known.

        Returns:
            Whether the policy is not the one that the rows were made by: then their version is unknown from now on.
        """
        is_other = uid != self.uid and bool(self.uid)
        known = 0
        if is_other:
            self._skipped.clear()
        else:
            # After a loss of power, rows may be of a version that the policy has not any more.
            known = max(self.newest, self._ordered[-1] - self._first) if self._ordered else self.newest
        if uid != self.uid and former and not known:
            self._skipped.skip_former(former)
            known = former
        if not is_other:
            self._skipped.follow(known, newest)
        self.uid, self.newest = uid, newest
        if is_other:
            self.num_former += 1
            self._sum = 0
        return is_other

    def get_versions(self, rows: Rows) -> NDArray[np.int64]:
        """Returns the versions of rows."""
        return np.maximum(self._numbers[rows] - self._first, UNKNOWN)

    def arrive(self, rows: Rows, versions: NDArray[np.int64] | None) -> None:
        """Records the versions of rows that are not members; None: all are of the newest."""
        self._numbers[rows] = self._first + (self.newest if versions is None else versions)

    def enter(self, rows: Rows) -> None:
        """Adds rows, each named once and none a member: they may be drawn now."""
        for number, same in self._iter_by_number(rows):
            bucket = self._buckets.get(number)
            if bucket is None:
                bucket = self._buckets[number] = _VersionBucket(self._chunk_rows)
                insort(self._ordered, number)
            bucket.num_members += len(same)
            self._sum += max(number - self._first, 0) * len(same)
            self._places[same] = bucket.append(same) + 1
            # A bucket in which most rows have gone is passed through faster than it grows.
            for _ in range(2 * len(same) // self._chunk_rows + 1):
                if not bucket.is_sparse:
                    break
                alive = self._select_alive(number, *bucket.pop_chunk())
                self._places[alive] = bucket.append(alive) + 1

    def leave(self, rows: Rows) -> None:
        """Removes members, each named once: they may not be drawn any more."""
        for number, same in self._iter_by_number(rows):
            bucket = self._buckets[number]
            bucket.num_members -= len(same)
            self._sum -= max(number - self._first, 0) * len(same)
            if not bucket.num_members:
                del self._buckets[number]
                del self._ordered[bisect_left(self._ordered, number)]
        self._places[rows] = 0

    def compute_floor(self, max_lag: int) -> int:
        """Returns the oldest version of a row of at most this lag."""
        return self._skipped.compute_floor(self.newest, max_lag)

    def compute_lags(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the lags of known versions; 0 for those that a loss of power has taken and that were the newest."""
        places = self._skipped.compute_places(np.append(versions, self.newest))
        lags: NDArray[np.int64] = np.maximum(places[-1] - places[:-1], 0)
        return lags

    def is_fresh(self, rows: Rows, max_lag: int) -> NDArray[np.bool_]:
        """Returns which of the rows have at most this lag."""
        return np.greater_equal(self._numbers[rows], self._first + self.compute_floor(max_lag))

    def find_between(self, low: int, high: int | None = None) -> Rows:
        """Returns the members of a version from ``low`` on, below ``high``; each once, oldest version first."""
        buckets = [(number, self._buckets[number]) for number in self._find_range(low, high)]
        found = [self._select_alive(number, *chunk) for number, bucket in buckets for chunk in bucket.iter_chunks()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def iter_pieces(self, low: int, high: int, *, piece_rows: int) -> Iterator[Rows]:
        """Yields the rows of :meth:`find_between`, at most ``piece_rows`` at a time, or none: each is a member when
        yielded. Rows may come and go meanwhile; those that come are not among them."""
        buckets = [(number, self._buckets[number]) for number in self._find_range(low, high)]
        chunks = [(number, rows) for number, bucket in buckets for _, rows in bucket.iter_chunks()]
        for number, rows in chunks:
            for start in range(0, len(rows), piece_rows):
                part = rows[start : start + piece_rows]
                part = part[(self._places[part] > 0) & (self._numbers[part] == number)]  # it may have moved
                yield sort_unique(part) if len(part) else part

    def count(self, low: int, high: int | None = None) -> int:
        """Returns the number of these members."""
        return sum(self._buckets[number].num_members for number in self._find_range(low, high))

    def measure_lags(self) -> Lags | None:
        """Returns the lags of the members whose version is known; None if there are none."""
        known = self._find_range(0, None)
        if not known:
            return None
        num_rows = self.count(0)
        lags = self.compute_lags(np.array(known if self._skipped else [known[0], known[-1]]) - self._first)
        mean = self.newest - self._sum / num_rows
        if self._skipped:
            mean = float(np.average(lags, weights=[self._buckets[number].num_members for number in known]))
        return Lags(int(lags[-1]), max(mean, 0.0), int(lags[0]))

    @property
    def _first(self) -> int:
        """The number of version 0."""
        return self.num_former * _NUMBERS_PER_POLICY

    def _find_range(self, low: int, high: int | None) -> list[int]:
        """Returns the numbers that have a bucket, of versions from ``low`` on, below ``high``."""
        begin = 0 if low == UNKNOWN else bisect_left(self._ordered, self._first + low)
        end = len(self._ordered) if high is None else bisect_left(self._ordered, self._first + high)
        return self._ordered[begin:end]

    def _iter_by_number(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """Yields the rows of each version; most writes have one."""
        if not len(rows):
            return
        numbers = self._numbers[rows]
        if (numbers == numbers[0]).all():
            yield int(numbers[0]), rows
            return
        order = np.argsort(numbers, kind="stable")
        rows, numbers = rows[order], numbers[order]
        heads = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        yield from zip(numbers[heads].tolist(), np.split(rows, heads[1:]), strict=True)

    def _select_alive(self, number: int, first: int, rows: Rows) -> Rows:
        """Returns the members among a chunk of a bucket, each where it came last: some rows have gone, or come back.

        Args:
            number: Number of the bucket.
            first: Place of the first row.
            rows: The rows.
        """
        is_here = self._places[rows] == np.arange(first + 1, first + 1 + len(rows))
        alive: Rows = rows[is_here & (self._numbers[rows] == number)]
        return alive


class _VersionBucket:
    """Rows of one version in the order in which they came, including those that have gone meanwhile: in chunks, since
    one array would take long to grow.

    Args:
        chunk_rows: Rows of a chunk.

    Attributes:
        num_members: Rows that have not gone.
    """

    def __init__(self, chunk_rows: int) -> None:
        self.num_members = 0
        self._chunk_rows = chunk_rows
        self._chunks: deque[Rows] = deque()  # full, except the last
        self._begin = self._end = 0  # places

    @property
    def is_sparse(self) -> bool:
        """Whether most rows have gone, of those in full chunks."""
        return self._end - self._begin > 2 * self.num_members + self._chunk_rows

    def append(self, rows: Rows) -> Rows:
        """Appends rows; returns their places."""
        begin, added = self._end, 0
        while added < len(rows):
            used = self._end % self._chunk_rows
            room = min(max(2 * used, used + len(rows) - added, _MIN_ROOM), self._chunk_rows) - used
            if not used:
                self._chunks.append(np.empty(room, np.int64))
            elif used == len(self._chunks[-1]):
                self._chunks[-1] = np.append(self._chunks[-1], np.empty(room, np.int64))
            chunk = self._chunks[-1]
            part = rows[added : added + len(chunk) - used]
            chunk[used : used + len(part)] = part
            added += len(part)
            self._end += len(part)
        return np.arange(begin, self._end)

    def iter_chunks(self) -> Iterator[tuple[int, Rows]]:
        """Yields the rows in parts, with the place of the first of each."""
        for first, rows in zip(range(self._begin, self._end, self._chunk_rows), self._chunks, strict=True):
            yield first, rows[: self._end - first]

    def pop_chunk(self) -> tuple[int, Rows]:
        """Removes the first chunk, which is full; returns the place of its first row, and the rows."""
        first, self._begin = self._begin, self._begin + self._chunk_rows
        return first, self._chunks.popleft()
