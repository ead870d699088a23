"""The newest rows of a table, and those that are new since the last look. Reads rows by number: nothing counts as
sampled."""

from __future__ import annotations

from typing import Any, NamedTuple

from tdserve.rules.replay.allocation.ring import ROW_ID_MASK

MAX_NEW_ROWS = 1000
"""Most rows of one look; those before them are counted."""

MAX_NEW_NBYTES = 64 << 20

WHOLE_NBYTES = 16 << 20
"""A table with no more live content than this is read as a whole: its rows may be in any order."""

SLACK_NBYTES = 4 << 20
"""Content that is read around the newest rows of a larger one: writers commit in another order than they reserve."""

MAX_SLACK_ROWS = 1024


class LatestRows(NamedTuple):
    """Rows, the newest last.

    Attributes:
        numbers: Number of each row.
        rows: A tensordict; None if there are none.
        num_left_out: New rows before them that are not among them.
    """

    numbers: list[int]
    rows: Any
    num_left_out: int = 0


class _Window(NamedTuple):
    """What one look has read.

    Attributes:
        generations: Generations of each live row in it, by number.
        spans: First and last number of each of its parts.
        is_whole: Whether it is the whole table.
        mark: Generation and number of its newest row.
    """

    generations: dict[int, int] = {}
    spans: tuple[tuple[int, int], ...] = ()
    is_whole: bool = False
    mark: tuple[int, int] = (0, -1)

    def is_new(self, row: int, generation: int) -> bool:
        """Returns whether a row was written after the look."""
        known = self.generations.get(row)
        if known is not None or self.is_whole:
            return known != generation
        return (generation, row) > self.mark or any(first <= row <= last for first, last in self.spans)


class NewRows:
    """Looks at one table of one server.

    A small table is read as a whole, and each new row found once. In a large one the rows around the newest are read:
    those of a ring with one writer are found in their order; of several writers, and where rows leave in another order
    than they came, some may be missed.

    Args:
        table: Its handle.
        first_number: Added to the numbers of its rows, if it is a part of a shared table.
    """

    def __init__(self, table: Any, first_number: int = 0) -> None:
        self._table = table
        self._first_number = first_number
        self._seen: _Window | None = None
        self._inserts = 0

    def take_last(self, num_rows: int) -> LatestRows:
        """Returns the newest rows; ``take_new`` then begins behind them."""
        facts = self._table.info()
        self._inserts = facts["inserts"]
        return self._look(facts, num_rows, num_rows, _Window(is_whole=True))

    def take_new(self) -> LatestRows:
        """Returns the rows that were written since the last call."""
        facts = self._table.info()
        num_new, self._inserts = facts["inserts"] - self._inserts, facts["inserts"]
        if not num_new or self._seen is None:
            return LatestRows([], None)
        if num_new < 0:  # its counts were reset, or it was created again
            num_new = facts["inserts"]
        max_rows = min(max(MAX_NEW_NBYTES // self._get_row_nbytes(), 1), MAX_NEW_ROWS)
        found = self._look(facts, min(num_new, max_rows), max_rows, self._seen)  # more may come in the meantime
        return found._replace(num_left_out=max(num_new - max_rows, 0))

    def _look(self, facts: dict[str, Any], num_rows: int, max_rows: int, before: _Window) -> LatestRows:
        import torch

        from tdserve.structure.tensordicts.instances import allow_unknown_classes

        with allow_unknown_classes():
            parts = [self._table.read_numbered(part) for part in self._choose(facts, num_rows)]
        numbers = torch.cat([part[1] for part in parts]).tolist()
        names = (torch.cat([part[2] for part in parts]) & ROW_ID_MASK).tolist()
        order = sorted(range(len(numbers)), key=lambda at: (names[at], numbers[at]))
        spans = tuple((int(part[1].min()), int(part[1].max())) for part in parts if len(part[1]))
        mark = (names[order[-1]], numbers[order[-1]]) if order else before.mark
        is_whole = len(numbers) >= facts["num_rows"]
        self._seen = _Window(dict(zip(numbers, names, strict=True)), spans, is_whole, mark)
        chosen = [at for at in order if before.is_new(numbers[at], names[at])][-max_rows:]
        if not chosen:
            return LatestRows([], None)
        rows = torch.cat([part[0] for part in parts]) if len(parts) > 1 else parts[0][0]
        return LatestRows([self._first_number + numbers[at] for at in chosen], rows[chosen])

    def _choose(self, facts: dict[str, Any], num_rows: int) -> list[slice]:
        """Returns which of the live rows are read, to find the newest ones among them."""
        live, capacity, row_nbytes = facts["num_rows"], facts["capacity"], self._get_row_nbytes()
        slack = min(max(SLACK_NBYTES // row_nbytes, 16), MAX_SLACK_ROWS)
        if live * row_nbytes <= WHOLE_NBYTES or live <= num_rows + 2 * slack:
            return [slice(None)]
        if facts["inserts"] <= capacity:
            return [slice(live - num_rows - slack, None)]
        end = facts["inserts"] % capacity
        start, stop = end - num_rows - slack, end + slack
        if start < 0:
            return [slice(start, None), slice(0, stop)]
        return [slice(start, stop)] if stop <= live else [slice(start, None), slice(0, stop - live)]

    def _get_row_nbytes(self) -> int:
        nbytes: int = self._table.spec.nbytes
        return max(nbytes, 64)
