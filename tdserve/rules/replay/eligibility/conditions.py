"""The conditions of a sample: which rows it may draw."""

from __future__ import annotations

from typing import NamedTuple

OWN = ""
"""The consumer of calls that name none: rows that it acknowledges leave the table."""


class SampleConditions(NamedTuple):
    """The conditions of a sample.

    Attributes:
        require: Numbers of the leaves that must have been written; None: all leaves of a row.
        consumer: The consumer; rows that it has had, or holds on lease, are left out.
        group: Name of the column by whose values rows are grouped; "": the table's sampler draws.
        group_size: Rows per whole group.
        max_lag: Largest lag of the rows behind the table's policy; None: any.
    """

    require: tuple[int, ...] | None = None
    consumer: str = OWN
    group: str = ""
    group_size: int = 0
    max_lag: int | None = None

    def describe(self, *, has_partial_rows: bool = True, missing: str = "") -> str:
        """Returns why too few rows can be drawn, for the error of a sample that waited for them.

        Args:
            has_partial_rows: Whether rows of the table may lack leaves.
            missing: Which leaves are missing in how many rows; "" if that is unknown.
        """
        reasons = []
        if self.group:
            reasons.append(f"are in whole groups of {self.group_size}")
        if self.require or (self.require is None and has_partial_rows):
            reason = f" ({missing})" if missing else ""
            reasons.append(("have all required keys" if self.require else "are whole") + reason)
        if self.consumer != OWN:
            reasons.append(f"consumer {self.consumer!r} has not had")
        if self.max_lag is not None:
            reasons.append(f"are at most {self.max_lag} versions old")
        return "too few " + (" and ".join(reasons) or "can be drawn now")


PLAIN = SampleConditions()
