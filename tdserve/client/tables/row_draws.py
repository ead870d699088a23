"""Draws of a table: rows are drawn, and taken on lease."""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import check_text
from tdserve.base.integers import check_integer
from tdserve.client.content.padding import Pad
from tdserve.client.handles.key_paths import check_path
from tdserve.client.tables.draws.draw_arguments import NO_CONDITIONS, Conditions
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.row_takes import RowTakes
from tdserve.client.tables.draws.share import Share
from tdserve.client.tables.draws.taking import Lease, Taken, acknowledge_given, choose_lease_s, renew, take_rows
from tdserve.client.tables.followed_table import FollowedTable
from tdserve.client.tables.table_policy import parse_max_lag
from tdserve.structure.trees.tree import Path


class RowDraws(RowTakes):
    """Draws rows from a table, and takes them on lease. Threads: safe.

    Args:
        table: Which is followed, if it has changed.
    """

    _table: FollowedTable

    def __init__(self, table: FollowedTable) -> None:
        self._table = table

    def make_query(
        self,
        conditions: Conditions = NO_CONDITIONS,
        *,
        is_lease: bool = False,
        pad: Pad = None,
        device: Any = None,
        numpy: bool | None = None,
        share: Share | None = None,
        deadline: Deadline | None = None,
    ) -> Query:
        """Makes the query of a sample, and checks it as far as the client can.

        Args:
            deadline: Deadline of a call of which this is a step; None: the client's default timeout begins now.

        Raises:
            KeyNotFoundError: Rows have no such leaf.
            InvalidRequestError: An argument is invalid.
        """
        require, consumer, group_by, group_size, max_lag, min_rows, lease_s = conditions
        table = self._table
        required = None if require is None else _check_keys(require)
        group = None if group_by is None else check_path(group_by, argument="group_by")
        for path in (*(required or ()), *(() if group is None else (group,))):
            table.check_key(path, table.client.make_deadline(None) if deadline is None else deadline)
        if not isinstance(consumer, str):
            raise InvalidRequestError(argument="consumer", reason=f"{consumer!r} is not a str")
        check_text("consumer", consumer)
        if group is not None:
            group_size = check_integer("group_size", group_size, 1)
        elif group_size:
            raise InvalidRequestError(argument="group_size", reason="it needs group_by")
        return Query(
            table.name,
            table.stored,
            table.added_columns[group is not None],
            require=required,
            consumer=consumer,
            group_by=group,
            group_size=group_size,
            max_lag=parse_max_lag(max_lag, table.settings, table.name),
            policy=table.settings.policy,
            is_lease=is_lease,
            pad=pad,
            device=device,
            is_plain=conditions == NO_CONDITIONS and not is_lease and share is None and table.settings.min_drawable > 0,
            is_ordered=table.settings.sampler.is_ordered,
            is_exact=not is_lease and share is None and table.settings.sampler.is_exact,
            is_numpy=table.client.is_numpy_wanted(numpy, device),
            share=share,
            awaits_done=table.settings.max_times_sampled > 0 and share is None,  # a draw for ranks is on record before
            min_rows=min_rows,
            lease_s=lease_s,
            kind=table.kind,
        )

    def take(
        self, num_rows: int, conditions: Conditions, timeout_s: float | None, *, pad: Pad, numpy: bool | None
    ) -> Taken:
        """See ``RowTakes``."""
        deadline = self._table.client.make_deadline(timeout_s)

        def draw() -> Taken:
            query = self.make_query(conditions, is_lease=True, pad=pad, numpy=numpy, deadline=deadline)
            return Taken(self._table.client, query, take_rows(self._table.client, query, num_rows, deadline))

        return self._table.follow_and_retry(draw, deadline)

    def _make_query_of_batches(self, conditions: Conditions, timeout_s: float | None, **form: Any) -> Query:
        deadline = self._table.client.make_deadline(timeout_s)
        return self.make_query(conditions, is_lease=True, deadline=deadline, **form)

    def acknowledge(self, rows: Any, timeout_s: float | None, consumer: str = "") -> None:
        """See ``RowTakes``."""
        query = self.make_query(Conditions(consumer=consumer), is_lease=True)
        acknowledge_given(self._table.client, query, rows, timeout_s)

    def renew(self, rows: Any, lease_s: float, timeout_s: float | None, consumer: str = "") -> None:
        """See ``RowTakes``."""
        query = self.make_query(Conditions(consumer=consumer), is_lease=True)
        seconds, client = choose_lease_s(query, lease_s), self._table.client
        renew(client, query, Lease(rows), seconds, client.make_deadline(timeout_s))


def _check_keys(require: Any) -> tuple[Path, ...]:
    """Returns the paths of keys; a tuple of str means several keys, as in ``require=("reward",)``."""
    if not isinstance(require, (str, list, tuple, set, frozenset)):
        raise InvalidRequestError(argument="require", reason=f"{require!r} is neither a key nor a list of keys")
    keys = [require] if isinstance(require, str) else list(require)
    return tuple(check_path(key, argument="require") for key in keys)
