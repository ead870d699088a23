"""The data that a table gets with new rows, and that it returns for rows to read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.live_rows import Rows

NO_ROWS: Rows = np.empty(0, np.int64)


class RowsPlan(NamedTuple):
    """Rows to read.

    Attributes:
        rows: Row numbers, in the order of the result.
        generations: Their generations now; a process that copies a row checks that its generation did not move
            meanwhile.
        columns: Columns that the sampler adds, by key.
        spent: Rows that leave the table once they were sent,
        spent_generations: and their generations.
        sequence: The rows' places in the order of commits, which identify them.
        lease: Owner, consumer and request, if the rows are handed out on lease.
        num_missing: Rows that are still to be drawn, see ``Table.draw_more``; they already count as sampled.
        batch_rows: Rows of each batch, if they depend on each other; of all batches otherwise.
        is_alone: Whether no other sample whose rows must differ is drawn until all of this one is.
        num_clears: How often the table had been cleared when they were counted.
        is_counted: Whether they count as sampled; otherwise they replace rows that do.
    """

    rows: Rows
    generations: Rows
    columns: Mapping[str, NDArray[Any]]
    spent: Rows = NO_ROWS
    spent_generations: Rows = NO_ROWS
    sequence: Rows = NO_ROWS
    lease: tuple[int, str, int] | None = None
    num_missing: int = 0
    batch_rows: int = 0
    is_alone: bool = False
    num_clears: int = 0
    is_counted: bool = True

    def has_repeated_rows(self) -> bool:
        """Returns whether a batch has a row twice; for very many rows, call it in a thread."""
        batches = np.sort(self.rows.reshape(-1, self.batch_rows), axis=1)
        return bool((batches[:, 1:] == batches[:, :-1]).any())

    @classmethod
    def join(cls, plans: Sequence[RowsPlan]) -> RowsPlan:
        """Returns one plan of the rows of several plans; ``num_missing`` is that of the last."""
        names = plans[0].columns
        return plans[-1]._replace(
            rows=np.concatenate([plan.rows for plan in plans]),
            generations=np.concatenate([plan.generations for plan in plans]),
            columns={name: np.concatenate([plan.columns[name] for plan in plans]) for name in names},
            spent=np.concatenate([plan.spent for plan in plans]),
            spent_generations=np.concatenate([plan.spent_generations for plan in plans]),
            sequence=np.concatenate([plan.sequence for plan in plans]),
        )


@dataclass(frozen=True, eq=False)
class Arrival:
    """The data that a writer gives with rows, beside their content.

    Attributes:
        priorities: One per row, checked; None: the highest so far.
        writer: The writer, whose rows form trajectories.
        ends: Which rows are the last of their trajectory.
        ids: Values that distinguish a writer's trajectories, one per row.
        keys: Numbers of the leaves that were written; None: all.
        groups: By column, the group of each row.
        policy_versions: Versions of the table's policy, one per row; None: the newest.
    """

    priorities: NDArray[np.float64] | None = None
    writer: Hashable = None
    ends: NDArray[np.bool_] | None = None
    ids: NDArray[Any] | None = None
    keys: Sequence[int] | None = None
    groups: Mapping[str, NDArray[np.int64]] = field(default_factory=lambda: MappingProxyType({}))
    policy_versions: NDArray[np.int64] | None = None

    def of(self, part: slice) -> Arrival:
        """Returns the data of some of the rows."""
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
    """Raises InvalidRequestError unless all priorities are finite and at least 0."""
    is_bad = ~(np.isfinite(priorities) & (priorities >= 0))
    if is_bad.any():
        bad = priorities[int(np.argmax(is_bad))]
        raise InvalidRequestError(argument="priority", reason=f"{bad} is not a finite number of at least 0")
