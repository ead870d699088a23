"""What a table is told of rows that come, and what it tells of rows that go out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.live_rows import Rows


def no_rows() -> Rows:
    """None at all."""
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class RowsPlan:
    """Rows to read.

    Attributes:
        rows: Row numbers, in the order of the result.
        generations: As they are now; whoever copies a row checks that its generation did not move meanwhile.
        columns: What the sampler adds of each row, by key.
        spent: Rows that leave the table when they were sent,
        spent_generations: and their generations.
        sequence: The rows' places in the order of commits, by which they are known again.
        lease: Owner and consumer, where the rows are handed out on lease.
        num_missing: Rows that are still to be drawn, see ``Table.draw_more``; they count as sampled already.
        num_clears: How often the table had been cleared when they were counted.
        is_counted: Whether they count as sampled; else they replace rows that do.
    """

    rows: Rows
    generations: Rows
    columns: Mapping[str, NDArray[Any]]
    spent: Rows = field(default_factory=no_rows)
    spent_generations: Rows = field(default_factory=no_rows)
    sequence: Rows = field(default_factory=no_rows)
    lease: tuple[int, str] | None = None
    num_missing: int = 0
    num_clears: int = 0
    is_counted: bool = True

    @classmethod
    def joined(cls, plans: Sequence[RowsPlan]) -> RowsPlan:
        """One plan of the rows of several, of which none are spent, by which nothing is missing any more but as the
        last says."""
        names = plans[0].columns
        return cls(
            np.concatenate([plan.rows for plan in plans]),
            np.concatenate([plan.generations for plan in plans]),
            {name: np.concatenate([plan.columns[name] for plan in plans]) for name in names},
            sequence=np.concatenate([plan.sequence for plan in plans]),
            num_missing=plans[-1].num_missing,
            num_clears=plans[0].num_clears,
            is_counted=plans[0].is_counted,
        )


@dataclass(frozen=True, eq=False)
class Arrival:
    """What is known of rows that a writer brings, beside their content.

    Attributes:
        priorities: One per row, checked; None: the highest so far.
        writer: Whose rows form trajectories.
        ends: Which rows are the last of their trajectory.
        ids: Values that tell a writer's trajectories apart, one per row.
        keys: Numbers of the leaves that were written; None: all.
        groups: By column, what each row is grouped by.
        policy_versions: Of the table's policy, one per row; None: the newest.
    """

    priorities: NDArray[np.float64] | None = None
    writer: Hashable = None
    ends: NDArray[np.bool_] | None = None
    ids: NDArray[Any] | None = None
    keys: Sequence[int] | None = None
    groups: Mapping[str, NDArray[np.int64]] = field(default_factory=lambda: MappingProxyType({}))
    policy_versions: NDArray[np.int64] | None = None

    def of(self, part: slice) -> Arrival:
        """What is known of some of the rows."""
        if self is PLAIN_ARRIVAL:
            return self
        return replace(
            self,
            priorities=None if self.priorities is None else self.priorities[part],
            ends=None if self.ends is None else self.ends[part],
            ids=None if self.ids is None else self.ids[part],
            groups={name: ids[part] for name, ids in self.groups.items()},
            policy_versions=None if self.policy_versions is None else self.policy_versions[part],
        )


PLAIN_ARRIVAL = Arrival()


def check_priorities(priorities: NDArray[np.float64]) -> None:
    """Raises InvalidRequestError unless all of these are finite and at least 0."""
    is_bad = ~(np.isfinite(priorities) & (priorities >= 0))
    if is_bad.any():
        bad = priorities[int(np.argmax(is_bad))]
        raise InvalidRequestError(argument="priority", reason=f"{bad} is not a finite number of at least 0")
