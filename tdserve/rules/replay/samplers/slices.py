"""Slices: consecutive rows of one trajectory; every possible start has the same probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tdserve.base.arguments import to_key_path
from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.base.integers import check_integer
from tdserve.messages.content import SLICE_END_KEY
from tdserve.messages.row_numbers import PIECE_ROWS, Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.row_indexes.live_rows import LiveRows
from tdserve.rules.replay.row_indexes.slice_starts import StartChanges, Starts
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.replay.samplers.selector import Drawn, Selector
from tdserve.rules.replay.samplers.trajectories import MAX_ALONE, Trajectories

_NONE = -1

# Each length that is kept costs 16 bytes per row, and time for every row that comes or goes.
_MAX_LENGTHS = 4

# A step of a walk costs as much as this many more rows in it; a pass over the table costs a step per row for each
# binary digit of the length. Measured.
_ROWS_OF_STEP = 100

# From this many stretches on, those that follow each other are joined.
_MIN_STRETCHES = 16

# Checking whether a walk may stop costs as much as half a step of it.
_STEPS_PER_LOOK = 8


@dataclass(frozen=True)
class Slices(Sampler):
    """Draws slices of trajectories. A sample of ``n`` rows has ``n / slice_len`` of them, concatenated.

    A slice has consecutive rows of one trajectory of one writer. Each is drawn independently of the others, from all
    places where a whole slice begins, so slices may overlap.

    Attributes:
        slice_len: Rows per slice; a sample counts rows, so it must be a multiple of this. Give this or ``num_slices``.
        num_slices: Slices per sample, whose length is then ``n / num_slices``.
        end_key: Key of the rows that is true at the end of a trajectory.
        trajectory_key: Key of the rows that is constant within a trajectory. At most one of these two; with neither,
            writers mark where a trajectory ends.
        strict_length: If False, the rest of an ended trajectory that is shorter than a slice may be drawn as a whole,
            with the probability of a start. Then a sample may have fewer rows.

    The last row of each slice is marked in the sample: by ``("next", "truncated")`` if rows have that key (it is true
    there whatever was written, as in torchrl's ``SliceSampler``), otherwise by ``"slice_end"``, bool ``[num_rows]``.

    Raises:
        InvalidRequestError: Both or none of ``slice_len`` and ``num_slices`` are given, both keys, or an invalid value.
    """

    slice_len: int | None = None
    num_slices: int | None = None
    end_key: str | tuple[str, ...] | None = None
    trajectory_key: str | tuple[str, ...] | None = None
    strict_length: bool = True

    kind: ClassVar[str] = "slices"
    adds: ClassVar[tuple[str, ...]] = (SLICE_END_KEY,)
    uses_trajectories: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.slice_len is None) == (self.num_slices is None):
            raise InvalidRequestError(argument="slice_len", reason="give either slice_len or num_slices")
        for argument in ("slice_len", "num_slices"):
            value = getattr(self, argument)
            if value is not None:
                object.__setattr__(self, argument, check_integer(argument, value, 1))
        if self.end_key is not None and self.trajectory_key is not None:
            raise InvalidRequestError(argument="end_key", reason="give either end_key or trajectory_key")
        for argument in ("end_key", "trajectory_key"):
            object.__setattr__(self, argument, to_key_path(argument, getattr(self, argument)))
        if not isinstance(self.strict_length, bool):
            raise InvalidRequestError(argument="strict_length", reason=f"{self.strict_length!r} is not a bool")

    @property
    def is_exact(self) -> bool:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return self.strict_length

    @property
    def marks_ends(self) -> bool:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return self.end_key is not None

    @property
    def trajectory_keys(self) -> tuple[tuple[str, ...], ...]:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`."""
        return tuple((key,) if isinstance(key, str) else key for key in (self.end_key, self.trajectory_key) if key)

    def check(self, capacity: int) -> None:
        """Refuses a setting under which no slice could ever be drawn.

        Raises:
            InvalidRequestError: A slice is longer than the table, and shorter ones do not count.
        """
        self._check_length("slice_len", self.slice_len or 1, capacity)

    def compute_length(self, num_rows: int, capacity: int) -> int:
        """Returns the rows of each slice in a sample of ``num_rows``.

        Raises:
            InvalidRequestError: ``num_rows`` is not a whole number of slices, or such a slice never fits.
        """
        parts = self.slice_len or self.num_slices or 1
        if num_rows % parts:
            what = f"slices of {parts} rows" if self.slice_len else f"rows in each of {parts} slices"
            raise InvalidRequestError(argument="num_rows", reason=f"{num_rows} rows are not a whole number of {what}")
        length = self.slice_len or num_rows // parts
        self._check_length("n", length, capacity)
        return length

    def compute_unit(self, num_rows: int, capacity: int) -> int:
        """See :class:`~tdserve.rules.replay.samplers.sampler.Sampler`: a slice."""
        return self.compute_length(num_rows, capacity)

    def make_selector(self, columns: RowColumns, capacity: int) -> SliceSelector:
        """Returns the selector, without rows at first.

        Raises:
            LocalProtocolError: The columns have no trajectories.
        """
        return SliceSelector(self, columns, capacity)

    def _check_length(self, argument: str, length: int, capacity: int) -> None:
        if self.strict_length and length > capacity:
            reason = f"slices of {length} rows never fit into a capacity of {capacity}"
            raise InvalidRequestError(argument=argument, reason=reason)


class Search:
    """A search for the starts of slices of one length, see
    :class:`~tdserve.rules.replay.samplers.selector.Preparation`.

    Args:
        selector: Whose starts these are.
        changes: Noted by the selector from now on.

    Attributes:
        dropped: The starts of other lengths that were dropped for these.
    """

    def __init__(self, selector: SliceSelector, changes: StartChanges) -> None:
        self.dropped: list[LiveRows] = []
        self._selector = selector
        self._changes = changes
        self._found: Starts | None = None

    @property
    def length(self) -> int:
        """Rows of a slice."""
        return self._changes.length

    def search(self) -> None:
        """Passes over the table; meant for a thread, while rows may come and go."""
        self._found = self._selector.build_starts(self.length)

    def finish_in_pieces(self) -> Iterator[None]:
        """Applies the changes to what was found, a piece at a time; other calls may do anything in between. Then a draw
        has the starts, unless another search has begun meanwhile."""
        num_rows, found, steps = 0, self._found, self._changes.steps
        while found is not None and self._selector.is_noting(self._changes):
            if not steps:
                self.dropped += self._selector.keep_starts(self.length, found)
                return
            rows, are_starts = steps.popleft()
            (found.include if are_starts else found.discard)(rows)
            num_rows += len(rows)
            if num_rows > PIECE_ROWS:
                num_rows = 0
                yield


class SliceSelector(Selector):
    """The members of a table or of one of its selectors, and the starts of slices for each length in use.

    A row begins a slice if it and enough rows after it, along the links of its trajectory, are all members. Rows must
    be linked before they are added, and removed before their links are cut. Adding and removing costs the rows times
    the longest length in use, about 4 µs a step for few rows; a new length costs a pass over the table, which a thread
    can make, see :meth:`prepare`.

    Args:
        setting: The sampler.
        columns: Columns of the table, with ``trajectories``.
        capacity: Number of rows.

    Raises:
        LocalProtocolError: The columns have no trajectories.
    """

    def __init__(self, setting: Slices, columns: RowColumns, capacity: int) -> None:
        if columns.trajectories is None:
            raise LocalProtocolError(reason="slices need a table with trajectories")
        self._setting = setting
        self._trajectories: Trajectories = columns.trajectories
        self._capacity = capacity
        self._num_members = 0
        # One entry more than rows, for the number -1: it stands for no row, and is not a member.
        self._is_member: NDArray[np.bool_] = np.zeros(capacity + 1, np.bool_)
        self._starts: dict[int, Starts] = {}
        self._changes: StartChanges | None = None
        if setting.slice_len is not None:
            self._get_starts(setting.slice_len)

    def __len__(self) -> int:
        return self._num_members

    def __repr__(self) -> str:
        return f"<SliceSelector {self._num_members} members, starts of {[*self._starts]}>"

    def compute_mass(self, num_rows: int) -> float:
        """Returns the number of places where a slice of such a sample begins."""
        return float(len(self._get_starts(self._get_length(num_rows))))

    @property
    def longest_slice(self) -> int:
        """Rows of the longest slices in use; 1 if there are none."""
        return max(self._starts, default=1)

    def list_starts(self, length: int) -> Rows:
        """Returns the rows where a slice of this length begins, sorted; a copy. For tests."""
        return self._get_starts(length).get_rows()

    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member; they are already linked.

        Raises:
            LocalProtocolError: A row is a member. Nothing was changed.
        """
        if not len(rows):
            return
        if self._is_member[rows].any():
            raise LocalProtocolError(reason="a row that may be drawn was added again")
        self._is_member[rows] = True
        self._num_members += len(rows)
        self._find_starts(rows)

    def remove(self, rows: Rows) -> None:
        """Removes rows, each named once; rows that are not members are ignored. Their links are not cut yet."""
        rows = rows[self._is_member[rows]]
        if not len(rows):
            return
        self._is_member[rows] = False
        self._num_members -= len(rows)
        self._lose_starts(rows)

    def draw(self, num_rows: int, *, rng: np.random.Generator, num_drawn: int = 0, num_total: int = 0) -> Drawn | None:
        """Chooses slices; None if none begins anywhere. ``slice_end`` is true on the last row of each.

        Raises:
            InvalidRequestError: As for :meth:`Slices.compute_length`. Nothing was changed.
        """
        length = self._setting.compute_length(num_total or num_rows, self._capacity)
        return self.draw_slices(num_rows // length, length, rng=rng)

    def draw_slices(self, num_slices: int, length: int, *, rng: np.random.Generator) -> Drawn | None:
        """Like :meth:`draw`, for callers that need a number of slices of a length, such as one at a time so that none
        overlap."""
        starts = self._get_starts(length)
        if not starts:
            return None
        drawn = starts.draw(rng, num_slices)
        rows = self._trajectories.follow(drawn, min(length, self._capacity)).ravel()
        if self._setting.strict_length:
            is_end = np.zeros(len(rows), np.bool_)
            is_end[length - 1 :: length] = True
            return Drawn(rows, {"slice_end": is_end})
        slice_num = np.repeat(np.arange(len(drawn)), len(rows) // len(drawn))[rows != _NONE]
        is_end = np.append(slice_num[1:] != slice_num[:-1], True)
        return Drawn(rows[rows != _NONE], {"slice_end": is_end})

    def is_unprepared(self, num_rows: int) -> bool:
        """See :class:`~tdserve.rules.replay.samplers.selector.Selector`."""
        try:
            return self._get_length(num_rows) not in self._starts
        except InvalidRequestError:
            return False  # the draw raises the reason

    def prepare(self, num_rows: int) -> Search | None:
        """See :class:`~tdserve.rules.replay.samplers.selector.Selector`."""
        if not self.is_unprepared(num_rows):
            return None
        self._changes = StartChanges(self._get_length(num_rows))
        return Search(self, self._changes)

    def is_noting(self, changes: StartChanges) -> bool:
        """Returns whether changes are still noted there: no other search has begun, and the starts are missing."""
        return self._changes is changes

    def _get_length(self, num_rows: int) -> int:
        """Returns the length of slices in a sample; nothing is longer than the table, so all such lengths are one."""
        return min(self._setting.compute_length(num_rows, self._capacity), self._capacity + 1)

    def _get_starts(self, length: int) -> Starts:
        """Returns the starts of a length, and makes it the most recently used."""
        length = min(length, self._capacity + 1)
        starts = self._starts.pop(length, None)
        if starts is None:
            starts = self.build_starts(length)
        self.keep_starts(length, starts)
        return starts

    def keep_starts(self, length: int, starts: Starts) -> list[Starts]:
        """Takes the starts of a length over; returns those that were dropped for it."""
        self._starts[length] = starts
        if self._changes is not None and self._changes.length == length:
            self._changes = None
        return [self._starts.pop(next(iter(self._starts))) for _ in range(len(self._starts) - _MAX_LENGTHS)]

    def build_starts(self, length: int) -> Starts:
        """Returns the starts of a length among the members, in as many passes as the length has binary digits.

        In a thread, rows may come and go meanwhile. What is found is right for all rows of which no change is noted: a
        link counts if it was there, to a row that was a member before and afterwards.
        """
        every = np.arange(self._capacity + 1)
        is_member, after = self._is_member.copy(), self._trajectories.after.copy()
        is_member &= self._is_member
        is_followed = is_member & is_member[after]
        is_followed &= after == self._trajectories.after
        jump = np.where(is_followed, after, _NONE)
        reached = np.where(is_member, every, _NONE)
        last = np.where(jump == _NONE, every, jump)
        steps = length - 1
        while steps:
            if steps & 1:
                reached = jump[reached]
            jump = jump[jump]
            if not self._setting.strict_length:
                last = last[last]
            steps >>= 1
        is_start = reached != _NONE
        if not self._setting.strict_length:
            is_head = is_member & ~is_member[self._trajectories.before]
            last[-1] = 0
            is_start |= is_head & self._trajectories.is_end[last]
        starts = Starts(self._capacity)
        starts.add(np.flatnonzero(is_start[:-1]))
        return starts

    def _find_starts(self, rows: Rows) -> None:
        """Adds the starts of all slices that contain one of these members."""
        rows, heads, lasts = self._find_stretches(rows)
        width = self._find_max_length()
        if self._is_pass_worth(len(heads), width):
            self._build_all()
            return
        before = self._follow_links(self._trajectories.before, rows[heads], width)
        after = self._follow_links(self._trajectories.after, rows[lasts], width)
        num_after = (after != _NONE).sum(axis=0)
        num_own = lasts - heads + 1
        behind_row = np.repeat(lasts + num_after, num_own) - np.arange(len(rows))
        behind_before = np.arange(len(before))[:, None] + (num_own + num_after)
        is_before = before != _NONE
        if self._changes is not None:
            self._changes.discard(np.concatenate((rows, before[is_before])))  # a thread may have seen them half changed
        for length, starts in self._iter_lengths():
            found = [rows[behind_row >= length - 1], before[is_before & (behind_before >= length - 1)]]
            if not self._setting.strict_length:
                num_before = is_before.sum(axis=0)
                # The row after a stretch was the start of a short rest, and is inside one now.
                starts.discard(after[0, (num_after > 0) & (num_after < length)])
                first = np.where(num_before, before[num_before - 1, np.arange(len(heads))], rows[heads])
                is_whole = self._is_whole(rows[lasts], after, num_before + num_own + num_after, length)
                found.append(first[is_whole])
            starts.include(np.concatenate(found))

    def _lose_starts(self, rows: Rows) -> None:
        """Removes the starts of all slices that contain one of these rows, which are not members any more."""
        rows, heads, lasts = self._find_stretches(rows)
        width = self._find_max_length()
        if self._is_pass_worth(len(heads), width):
            self._build_all()
            return
        before = self._follow_links(self._trajectories.before, rows[heads], width)
        for length, starts in self._iter_lengths():
            near = before[: length - 1]
            starts.discard(np.concatenate((rows, near[near != _NONE])))
        if not self._setting.strict_length:
            after = self._follow_links(self._trajectories.after, rows[lasts], width)
            num_after = (after != _NONE).sum(axis=0)
            for length, starts in self._iter_lengths():
                starts.include(after[0, self._is_whole(rows[lasts], after, num_after, length) & (num_after > 0)])

    def _is_whole(self, rows: Rows, after: Rows, num_rows: Rows, length: int) -> NDArray[np.bool_]:
        """Returns which runs of ``num_rows`` members are shorter than a slice and end with their trajectory.

        Args:
            rows: A member or former member in each run, or right before it.
            after: The run's members after that one, ``[step, run]``.
            num_rows: Rows of the run.
            length: Length of a slice.
        """
        num_after = (after != _NONE).sum(axis=0)
        last = np.where(num_after, after[num_after - 1, np.arange(len(rows))], rows)
        is_whole: NDArray[np.bool_] = (num_rows < length) & self._trajectories.is_end[last]
        return is_whole

    def _build_all(self) -> None:
        """Finds all starts again, which is faster than checking around many rows."""
        self._starts = {length: self.build_starts(length) for length, _ in self._iter_lengths()}
        self._changes = None

    def _iter_lengths(self) -> Iterator[tuple[int, Starts | StartChanges]]:
        yield from self._starts.items()
        if self._changes is not None:
            yield self._changes.length, self._changes

    def _find_max_length(self) -> int:
        return max((length for length, _ in self._iter_lengths()), default=0)

    def _is_pass_worth(self, num_heads: int, width: int) -> bool:
        """Returns whether a pass over the table is faster than walks of this many steps from this many rows."""
        costs = width * (_ROWS_OF_STEP + num_heads)
        return costs > self._capacity * width.bit_length() or width * num_heads > self._capacity

    def _find_stretches(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Returns the rows, where in them each stretch of consecutive rows of a trajectory begins, and where it ends.

        Rows of writers that take turns are many stretches: these are put in the order of their trajectories.
        """
        heads, lasts = self._find_bounds(rows)
        if len(heads) >= _MIN_STRETCHES:
            rows = rows[_spread(heads, lasts, self._find_order(rows[heads], rows[lasts]))]
            heads, lasts = self._find_bounds(rows)
        return rows, heads, lasts

    def _find_bounds(self, rows: Rows) -> tuple[Rows, Rows]:
        is_joint = self._trajectories.after[rows[:-1]] == rows[1:]
        heads = np.flatnonzero(np.concatenate(((True,), ~is_joint)))
        return heads, np.append(heads[1:], len(rows)) - 1

    def _find_order(self, firsts: Rows, lasts: Rows) -> Rows:
        """Returns the numbers of stretches, given their first and last rows, in an order in which those that follow
        each other do so."""
        by_first = np.argsort(firsts)
        follower = self._trajectories.after[lasts]
        places = np.minimum(np.searchsorted(firsts, follower, sorter=by_first), len(firsts) - 1)
        is_followed = firsts[by_first[places]] == follower
        origin = np.arange(len(firsts))
        origin[by_first[places[is_followed]]] = np.flatnonzero(is_followed)
        distance = (origin != np.arange(len(firsts))).astype(np.int64)
        while ((further := origin[origin]) != origin).any():  # each round doubles the reach
            distance += distance[origin]
            origin = further
        return np.lexsort((distance, origin))

    def _follow_links(self, links: Rows, rows: Rows, num_steps: int) -> Rows:
        """Returns the members along the links from each row, itself not included: ``[step, row]``, -1 from the first
        gap on. There are fewer steps if all end earlier, but at least one."""
        if len(rows) <= MAX_ALONE:
            return self._walk_alone(links, rows, num_steps)
        found: Rows = np.empty((num_steps, len(rows)), np.int64)
        for step in range(num_steps):
            rows = links[rows]
            rows[~self._is_member[rows]] = _NONE
            found[step] = rows
            if step % _STEPS_PER_LOOK == 0 and not (rows != _NONE).any():
                return found[: step + 1]
        return found

    def _walk_alone(self, links: Rows, rows: Rows, num_steps: int) -> Rows:
        """As :meth:`_follow_links`, from one row after the other."""
        next_of, is_member = links.data, self._is_member.data  # which are indexed faster than arrays
        walks: list[list[int]] = []
        for row in rows.tolist():
            walk: list[int] = []
            while len(walk) < num_steps and is_member[row := next_of[row]]:
                walk.append(row)
            walks.append(walk)
        found: Rows = np.full((max(map(len, walks), default=0) or 1, len(rows)), _NONE, np.int64)
        for number, walk in enumerate(walks):
            found[: len(walk), number] = walk
        return found


def _spread(heads: Rows, lasts: Rows, order: Rows) -> Rows:
    """Returns the places of all rows of stretches, in an order of the stretches."""
    sizes = (lasts - heads + 1)[order]
    return np.repeat(heads[order] - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
