"""Calls of a store that may have moved before its server ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError
from tdserve.client.session.calls.call_conditions import RETRY_BACKOFF_S, is_over
from tdserve.client.session.calls.reach import is_patient, reach_within
from tdserve.rules.lost_servers import REACH_S

_Result = TypeVar("_Result")


def call_and_follow(
    call: Callable[[], _Result], look_again: Callable[[ConnectError], bool], deadline: Deadline
) -> _Result:
    """Makes a call. While no server listens where the store was known to be, and nothing was sent, it is made again.

    Args:
        call: Makes the call at the server that is known to have the store.
        look_again: Asks for the place of the store, after this error; returns whether it is at another server now.
        deadline: Deadline of the call.

    Raises:
        ConnectError: Nothing was sent in time; or the caller tries others, and the store is where it was.
    """
    keeps_on = is_patient()
    while True:
        try:
            with reach_within(REACH_S, is_for_unsent=True) if keeps_on else nullcontext():
                return call()
        except ConnectError as error:
            if not error.retryable or is_over(deadline, RETRY_BACKOFF_S):
                raise
            if not look_again(error) and not keeps_on:
                raise
        time.sleep(RETRY_BACKOFF_S)
