"""The data that a table gets with new rows, and that it returns for rows to read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.row_numbers import NO_ROWS, Rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.eligibility.conditions import OWN, SampleConditions


@dataclass(eq=False, slots=True)
class RowsPlan:
    """Rows to read.

    Attributes:
        rows: Row numbers, in the order of the result.
        generations: Their generations now; a process that copies a row checks afterwards that its generation
            is still the same.
        columns: Columns that the sampler adds, by key.
        spent: Rows that leave the table once they were sent,
        spent_generations: and their generations.
    """

    rows: Rows
    generations: Rows
    columns: Mapping[str, NDArray[Any]]
    spent: Rows = field(default_factory=lambda: NO_ROWS)
    spent_generations: Rows = field(default_factory=lambda: NO_ROWS)


@dataclass(eq=False, slots=True)
class SampleTerms:
    """What holds for all parts of a sample.

    Attributes:
        conditions: Which rows it may draw.
        lease: Owner, consumer and request, if the rows are handed out on lease.
        batch_rows: Rows of each batch, if they depend on each other; of all batches otherwise.
        is_alone: Whether no other sample whose rows must differ is drawn until all of this one is.
        num_clears: How often the table had been cleared when its rows were counted.
        is_counted: Whether its rows count as sampled; otherwise they replace rows that do.
        is_apart: Whether its rows differ although the sampler may draw one twice.
        whole_rows: Rows of the sample of which it is a part that one server draws; 0: it is no such part.
    """

    conditions: SampleConditions
    lease: tuple[int, str, int] | None
    batch_rows: int
    is_alone: bool
    num_clears: int
    is_counted: bool
    is_apart: bool = False
    whole_rows: int = 0

    @property
    def num_total(self) -> int:
        """Rows among which units are counted: of the whole sample, or of a batch."""
        return self.whole_rows or self.batch_rows


@dataclass(eq=False, slots=True, kw_only=True)
class SamplePlan(RowsPlan):
    """Rows of a sample, or of a part of one that is drawn a part at a time.

    Attributes:
        terms: The terms of the sample.
        num_missing: Rows of it that are still to be drawn, see ``TableSamples.draw_more``; they already count as
            sampled.
        sequence: The rows' places in the order of commits, which identify them.
    """

    terms: SampleTerms
    num_missing: int
    sequence: Rows

    def has_repeated_rows(self) -> bool:
        """Returns whether a batch has a row twice; for very many rows, call it in a thread."""
        batches = np.sort(self.rows.reshape(-1, self.terms.batch_rows), axis=1)
        return bool((batches[:, 1:] == batches[:, :-1]).any())

    @classmethod
    def join(cls, plans: Sequence[SamplePlan]) -> SamplePlan:
        """Returns one plan of the rows of several parts; ``num_missing`` is that of the last."""
        names = plans[0].columns
        return replace(
            plans[-1],
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
        writers: For rows of several writers, which arrive all at once: each and its number of rows, in the order of
            the rows; (): all are of ``writer``.
        ends: Which rows are the last of their trajectory.
        ids: Values that distinguish a writer's trajectories, one per row.
        keys: Numbers of the leaves that were written; None: all.
        groups: By column, the group of each row.
        policy_versions: Versions of the table's policy, one per row; None: the newest.
    """

    priorities: NDArray[np.float64] | None = None
    writer: Hashable = None
    writers: Sequence[tuple[Hashable, int]] = ()
    ends: NDArray[np.bool_] | None = None
    ids: NDArray[Any] | None = None
    keys: Sequence[int] | None = None
    groups: Mapping[str, NDArray[np.int64]] = field(default_factory=lambda: MappingProxyType({}))
    policy_versions: NDArray[np.int64] | None = None

    def select_part(self, part: slice) -> Arrival:
        """Returns the data of some of the rows."""
        if (
            all(each is None for each in (self.priorities, self.ends, self.ids, self.policy_versions))
            and not self.groups
        ):
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


@dataclass(frozen=True, eq=False)
class Departure:
    """Rows that leave the table, or that a consumer has had. Carrying it out twice changes nothing more.

    Attributes:
        rows: Row numbers.
        num_rows: How many of them are in the table, at the time of the decision.
        newest: Place of the newest row in the order of commits at that time. Rows that were committed later at these
            numbers are others, and stay.
        consumer: The consumer that has had them; ``OWN``: they leave the table.
        num_leaving: How many leave the table.
    """

    rows: RowSet
    num_rows: int
    newest: int
    consumer: str = OWN
    num_leaving: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the rows leave the table."""
        return self.consumer == OWN


def check_priorities(priorities: NDArray[np.float64]) -> None:
    """Raises InvalidRequestError unless all priorities are finite and at least 0."""
    is_bad = ~(np.isfinite(priorities) & (priorities >= 0))
    if is_bad.any():
        bad = priorities[int(np.argmax(is_bad))]
        raise InvalidRequestError(argument="priority", reason=f"{bad} is not a finite number of at least 0")
