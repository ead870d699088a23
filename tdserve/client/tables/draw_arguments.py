"""The arguments of a draw from a table, as callers give them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.client.content.fake_modes import ROWS, check_real
from tdserve.messages.content import MAX_SAMPLE_ROWS


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


def check_min_rows(min_rows: Any, num_rows: int) -> int:
    """Returns the fewest rows that a take of ``num_rows`` may have; 0 for None: all of them."""
    return 0 if min_rows is None else check_integer("min_rows", min_rows, 1, maximum=num_rows)


class Conditions(NamedTuple):
    """Conditions of a draw, as given; arguments as of ``ReplayHandle.sample`` and ``ReplayHandle.take``."""

    require: Any = None
    consumer: str = ""
    group_by: Any = None
    group_size: int = 0
    max_lag: int | None = None
    min_rows: int = 0


NO_CONDITIONS = Conditions()
