"""What the receivers of weights report: which version each applied, when, and what failed last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, KeyNotFoundError, TDServeError, WrongStateError
from tdserve.client.client import Client
from tdserve.client.kv.keyed_handle import KeyedHandle

SUFFIX = ".receivers"
"""Ends the name of the keyed store of reports; the beginning is the name of the weights."""

REPORT_S = 5.0
"""Timeout of a report: it comes again with the next version."""

STATES_POLL_S = 0.5
"""How soon a sender sees that a receiver has passed over its version, which it then never confirms."""

_STATES, _APPLIED = "state/", "applied/"


class ReceiverState(NamedTuple):
    """The last report of a receiver.

    Attributes:
        version: The version that it acts with; 0 before the first.
        age_s: Seconds since it was applied; infinite before the first.
        last_error: What failed last since then; "" if nothing did.
    """

    version: int
    age_s: float
    last_error: str


class Receivers:
    """The reports of the receivers of some weights, in a keyed store beside them. Threads: safe.

    Args:
        client: Client of this process.
        weights: Name of the weights.
    """

    def __init__(self, client: Client, weights: str) -> None:
        self._weights = weights
        self._store: KeyedHandle = client.create_kv(f"{weights}{SUFFIX}", exists_ok=True)

    def clear(self) -> None:
        """Removes all reports, for a publisher that begins."""
        self._store.delete(self._store.keys(), missing_ok=True)

    def report(self, receiver: str, version: int, applied_s: float, last_error: str) -> None:
        """Reports a receiver's state.

        Args:
            receiver: Its number or name.
            applied_s: When the version was applied, seconds since the epoch; 0 before the first.
        """
        state = {"version": version, "applied_s": applied_s, "last_error": last_error}
        self._store.put(f"{_STATES}{receiver}", state, timeout_s=REPORT_S)

    def confirm(self, receiver: str, version: int, error: str) -> None:
        """Reports that a receiver has applied a version, or why it could not."""
        self._store.put(f"{_APPLIED}{version}/{receiver}", error)

    def wait_applied(self, receivers: Sequence[str], version: int, timeout_s: float | None) -> None:
        """Waits until receivers have confirmed a version, or reported that they act with a newer one, and removes the
        confirmations.

        Raises:
            DeadlineExceededError: Some did not in time; the error names them. They may do so later.
            WrongStateError: Some could not apply it; the error has their reasons.
        """
        keys = [f"{_APPLIED}{version}/{receiver}" for receiver in receivers]
        deadline = Deadline.after(timeout_s)
        while True:
            errors = self._read_confirmations(keys, deadline.limit(STATES_POLL_S))
            missing = [receiver for receiver, error in zip(receivers, errors, strict=True) if error is None]
            states = self.list_states() if missing else {}
            missing = [receiver for receiver in missing if receiver not in states or states[receiver].version < version]
            if not missing:
                break
            deadline.raise_if_expired(f"version {version} of {self._weights!r} in workers {', '.join(missing)}")
        with suppress(TDServeError):  # clear() removes them too
            self._store.delete(keys, missing_ok=True)
        reasons = [f"worker {receiver}: {error}" for receiver, error in zip(receivers, errors, strict=True) if error]
        if reasons:
            state = f"version {version} of {self._weights!r} is published, but not applied by {'; '.join(reasons)}"
            raise WrongStateError(state=state, event="send()")

    def _read_confirmations(self, keys: Sequence[str], wait_s: float) -> list[str | None]:
        """Returns what was confirmed, "" or the reason why not; None for what is not there within so many seconds."""
        try:
            found: list[str | None] = self._store.get(keys, timeout_s=wait_s)
        except (DeadlineExceededError, KeyNotFoundError):
            found = self._store.get(keys, default=None)
        return found

    def list_states(self) -> dict[str, ReceiverState]:
        """Returns the last report of each receiver."""
        keys = self._store.keys(_STATES)
        found = self._store.get(keys, default=None) if keys else []
        now_s = time.time()
        return {
            key.removeprefix(_STATES): ReceiverState(
                each["version"], now_s - each["applied_s"] if each["applied_s"] else float("inf"), each["last_error"]
            )
            for key, each in zip(keys, found, strict=True)
            if each is not None  # else clear() removed it just now
        }
