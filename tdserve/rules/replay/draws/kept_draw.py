"""One draw for all ranks of a data-parallel job, with its terms, its rows, and how they are dealt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.draws.dealing import deal
from tdserve.rules.replay.eligibility.conditions import SampleConditions

MAX_RUN_BYTES = 200
"""Most bytes of the name of a run, which is a part of a key of LMDB."""


Rename = Callable[[Rows, Rows], Rows]
"""Returns new row ids of rows, of these and their earlier ids."""


class DrawTerms(NamedTuple):
    """What all ranks must agree on in a step.

    Attributes:
        num_rows: Rows of each rank.
        world_size: Number of ranks.
        conditions: Which rows may be drawn.
        balance: Leaf by whose sizes the rows are dealt; (): in turn.
        run: Name of the job, whose steps are its own.
    """

    num_rows: int
    world_size: int
    conditions: SampleConditions
    balance: tuple[str, ...] = ()
    run: str = ""

    @property
    def num_drawn(self) -> int:
        """Returns the rows of all ranks together."""
        return self.num_rows * self.world_size


@dataclass(eq=False)
class KeptDraw:
    """One draw.

    Attributes:
        step: Its step.
        terms: Its terms.
        rows: The rows of all ranks, all different.
        row_ids: What identifies them, see ``Ring.get_row_ids``.
        columns: Columns that the sampler adds, by key.
        spent: Rows that leave the table when the draw is forgotten,
        spent_ids: What identifies these.
        shares: For each rank the places of its rows in ``rows``; None until they are dealt.
        ranks_beyond: Ranks that have asked for a later step: they have what they need of this one.
    """

    step: int
    terms: DrawTerms
    rows: Rows
    row_ids: Rows
    columns: Mapping[str, NDArray[Any]]
    spent: Rows
    spent_ids: Rows
    shares: Rows | None = None
    ranks_beyond: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have asked for a later step."""
        return len(self.ranks_beyond) >= self.terms.world_size

    def deal(self, sizes: NDArray[np.int64] | None = None) -> None:
        """Deals the rows to the ranks, whole groups together.

        Args:
            sizes: Size of each row, to be balanced; None: they are dealt in turn.
        """
        unit = self.terms.conditions.group_size or 1
        totals = None if sizes is None else sizes.reshape(-1, unit).sum(axis=1)
        units = deal(len(self.rows) // unit, self.terms.world_size, totals)
        self.shares = (units[:, :, None] * unit + np.arange(unit)).reshape(self.terms.world_size, -1)

    def rename(self, rename: Rename) -> None:
        """Follows new generations that all rows of its table have got."""
        self.row_ids, self.spent_ids = rename(self.rows, self.row_ids), rename(self.spent, self.spent_ids)

    def to_bytes(self) -> bytes:
        """Returns its record, from which :meth:`from_bytes` makes it again."""
        terms = self.terms._asdict() | {"conditions": self.terms.conditions._asdict()}
        arrays = {"rows": self.rows, "names": self.row_ids, "spent": self.spent, "spent_names": self.spent_ids}
        if self.shares is not None:
            arrays["shares"] = self.shares
        arrays |= {f"column {name}": column for name, column in self.columns.items()}
        kinds = [[name, array.dtype.str, len(array.reshape(-1))] for name, array in arrays.items()]
        head = json.dumps({"step": self.step, "terms": terms, "arrays": kinds}).encode()
        return head + b"\n" + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())

    @classmethod
    def from_bytes(cls, record: bytes) -> KeptDraw:
        """Returns the draw of a record."""
        head, _, content = record.partition(b"\n")
        fields, arrays, at = json.loads(head), {}, 0
        for name, dtype, length in fields["arrays"]:
            arrays[name] = np.frombuffer(content, dtype, length, at).copy()
            at += arrays[name].nbytes
        terms = fields["terms"]
        conditions = terms["conditions"]
        if conditions["require"] is not None:
            conditions["require"] = tuple(conditions["require"])
        terms |= {"conditions": SampleConditions(**conditions), "balance": tuple(terms["balance"])}
        shares = arrays.get("shares")
        return cls(
            fields["step"],
            found := DrawTerms(**terms),
            arrays["rows"],
            arrays["names"],
            {name.removeprefix("column "): array for name, array in arrays.items() if name.startswith("column ")},
            arrays["spent"],
            arrays["spent_names"],
            shares=None if shares is None else shares.reshape(found.world_size, -1),
        )
