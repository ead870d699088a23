"""The arguments of a draw from a table, as callers give them: of a table of one server, or of several."""

from __future__ import annotations

import math
import numbers
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.client.tables.draws.share import Share
from tdserve.messages.content import MAX_SAMPLE_ROWS
from tdserve.rules.replay.draws.kept_draws import MAX_KEPT_DRAWS

MAX_PREFETCHED_STEPS = MAX_KEPT_DRAWS // 2
"""Most steps that a rank is ahead of itself: a rank that is as far behind finds its draws still kept."""


def check_num_rows(num_rows: Any, device: Any) -> int:
    """Checks the arguments of a sample as far as possible before anything is drawn; returns the number of rows.

    Raises:
        InvalidRequestError, NotSupportedError: No such sample is possible.
    """
    check_real("drawing rows", ROWS)
    number = check_integer("num_rows", num_rows, 1, maximum=MAX_SAMPLE_ROWS)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as fault:  # AssertionError: a build without CUDA
            raise InvalidRequestError(argument="device", reason=f"{device!r}: {str(fault)[:200]}") from fault
    return number


def _check_min_rows(min_rows: Any, num_rows: int) -> int:
    """Returns the fewest rows that a take of ``num_rows`` may have; 0 for None: all of them."""
    return 0 if min_rows is None else check_integer("min_rows", min_rows, 1, maximum=num_rows)


class Ahead(NamedTuple):
    """What an iterator over samples draws ahead.

    Attributes:
        num_batches: Under way or waiting, at most.
        drop_after_s: A batch that has waited longer is dropped; infinity: none is.
    """

    num_batches: int
    drop_after_s: float


def check_ahead(prefetch: Any, drop: Any, consumer: Any, share: Share | None, *, min_rows: Any, lease_s: Any) -> Ahead:
    """Checks which arguments of ``ReplayHandle.batches`` go together; returns what is drawn ahead.

    Raises:
        InvalidRequestError: One is invalid, or is not for this reader.
    """
    num_batches = check_integer("prefetch", prefetch, 1)
    if share is not None or not consumer:
        _check_absent(min_rows=min_rows, lease_s=lease_s)
    if share is not None and (drop is not None or num_batches > MAX_PREFETCHED_STEPS):
        argument, given = ("prefetch", prefetch) if drop is None else ("drop", drop)
        reason = f"{given!r}: a rank drops no batch, and prefetches at most {MAX_PREFETCHED_STEPS}"
        raise InvalidRequestError(argument=argument, reason=reason)
    return Ahead(num_batches, _check_drop_s(drop))


def _check_drop_s(drop: Any) -> float:
    if drop is None:
        return math.inf
    if isinstance(drop, bool) or not isinstance(drop, (int, float)) or not drop > 0:
        raise InvalidRequestError(argument="drop", reason=f"{drop!r} is not a number of seconds above 0")
    return float(drop)


def check_lease_s(lease_s: Any) -> float:
    """Returns how long a lease lasts, seconds; 0.0 for None: as long as the session.

    Raises:
        InvalidRequestError: It is not a finite number above 0.
    """
    if lease_s is None:
        return 0.0
    lasting_s = 0.0
    if isinstance(lease_s, numbers.Real) and not isinstance(lease_s, bool):  # NumPy's are, too
        with suppress(OverflowError):
            lasting_s = float(lease_s)
    if not 0.0 < lasting_s < math.inf:
        raise InvalidRequestError(argument="lease_s", reason=f"{lease_s!r} is not a number of seconds above 0")
    return lasting_s


def _check_absent(**arguments: Any) -> None:
    """Raises InvalidRequestError if one of these arguments is given, which are for takes of a consumer alone."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidRequestError(argument=name, reason="it is for rows that a consumer takes, without a rank")


class Conditions(NamedTuple):
    """Conditions of a draw, as given; arguments as in ``ReplayHandle.sample`` and ``ReplayHandle.take``."""

    require: Any = None
    consumer: str = ""
    group_by: Any = None
    group_size: int = 0
    max_lag: int | None = None
    min_rows: int = 0
    lease_s: float = 0.0

    def adapt_to_take(self, num_rows: int, min_rows: Any, lease_s: Any) -> Conditions:
        """Returns the conditions of a take of this many rows; its own arguments are checked.

        Raises:
            InvalidRequestError: One of them is invalid.
        """
        return self._replace(min_rows=_check_min_rows(min_rows, num_rows), lease_s=check_lease_s(lease_s))


NO_CONDITIONS = Conditions()
