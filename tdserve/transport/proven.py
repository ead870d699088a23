"""Gloo groups whose ranks have proved to each other that they belong together.

Facts that this file relies on, measured with torch 2.13 on Linux:

* ``ProcessGroupGloo`` built directly on a ``Store`` does not touch the user's default group, ``MASTER_ADDR`` and so on.
* A Python subclass of ``Store`` works as rendezvous, as long as a reference to it is kept.
* A group runs collectives in threads of its own, one pair of them by default. Sends and receives need none, so groups
  here have none.
* A device listens on a port of its own, in a thread of its own, and has four descriptors; making one takes half a
  millisecond. As long as it lives it keeps every connection that no pair waits for.
* A connection belongs to the pair whose number it sends, and the first one wins. So a stranger that is faster than the
  peer becomes the peer, and its bytes may end the process (SIGABRT) before any proof is asked for.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tdserve.base.errors import ConnectError, TransportError
from tdserve.transport.distributed_private import make_gloo_options
from tdserve.transport.forming_groups import end_connecting, is_ending, note_forming
from tdserve.transport.gloo_reasons import get_reason
from tdserve.transport.proving import ChannelCredential, UnprovenError, prove
from tdserve.transport.rendezvous import Branch, KVStore
from tdserve.transport.strangers import describe_connections

CLOSING_TAG = 0
"""No request has this number: a receive with this tag never completes."""

CLOSING_TIMEOUT = timedelta(milliseconds=1)
"""Timeout of the receive whose failure closes a pair."""

FIRST_PROOF_S = 1.0
LONGEST_PROOF_S = 3.0
"""Longest time for the proofs of a connected group: they take a quarter of a millisecond. Each attempt gets twice the
time of the previous one, for busy machines."""

PROOF_PER_RANK_S = 0.05
"""Extra time for each rank of a group."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
"""Longest pause between two attempts: a stranger that takes number after number keeps no process busy."""

MAX_UNCONNECTED = 3
"""Attempts that may fail before the ranks are connected."""

LOG_INTERVAL_S = 10.0
"""Pause between two log lines about groups whose ranks did not prove themselves."""

MAX_UNFORMED = 4
"""Groups that may fail to form on a device before others get a new one. gloo keeps a connection to a pair that was
given up, and its descriptor, as long as the device lives (measured); a device has four descriptors itself."""

_MAX_DEVICES = 16

_PROVEN, _FAILED = b"proven", b"failed"

_FORMING_FAULTS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError, ConnectError)
"""Python's types of gloo's exceptions: gloo parses the peer's address without checking it."""

_log = logging.getLogger("tdserve.transport")


class _GlooDevice:
    def __init__(self, host: str) -> None:
        self.device = dist.ProcessGroupGloo.create_device(hostname=host)
        self.num_unformed = 0


class _Refusals:
    """Counts the groups that did not prove themselves in this process; of many, few are logged."""

    def __init__(self) -> None:
        self.num = 0
        self._num_logged = 0
        self._logged_s = -LOG_INTERVAL_S

    def note(self, purpose: str, reason: str, address: bytes | None) -> None:
        """Counts one more."""
        self.num += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s, num_new, self._num_logged = now_s, self.num - self._num_logged, self.num
        _log.warning(
            "the gloo connection for %s was refused (%s; %d since the last such line). Its process may have ended "
            "meanwhile, as a forked child does that exits at once, or a stranger came first: %s. Another port is "
            "tried. The ports of gloo belong in a trusted network",
            purpose,
            reason,
            num_new,
            describe_connections(address),
        )


refusals = _Refusals()
_devices: dict[tuple[str, int], _GlooDevice] = {}  # no lock, which a fork could find taken: operations are atomic


def get_gloo_device(host: str, pid: int) -> _GlooDevice:
    """Returns the gloo device (one thread, one event loop) of an address and process: a hundred groups share it."""
    found = _devices.get((host, pid))
    if found is None:
        if len(_devices) >= _MAX_DEVICES:
            _devices.pop(next(iter(_devices)), None)
        found = _devices.setdefault((host, pid), _GlooDevice(host))
    return found


def note_unformed(host: str, pid: int) -> None:
    """Notes that a group did not form on the device of this address; after some of these the device goes with its last
    group."""
    found = _devices.get((host, pid))
    if found is not None:
        found.num_unformed += 1
        if found.num_unformed >= MAX_UNFORMED:
            _devices.pop((host, pid), None)


def leave_all_devices() -> None:
    """Gives later groups other devices; the present devices go with their last groups."""
    _devices.clear()


def _leave(device: _GlooDevice, host: str, pid: int) -> None:
    """Gives the next group another device, whose port and numbers are unknown to strangers."""
    if _devices.get((host, pid)) is device:
        _devices.pop((host, pid), None)


class _NotingStore(Branch):
    """The rendezvous of one attempt.

    Attributes:
        sent_address: The address that this rank has sent.
        num_addresses: How often another rank's address was requested and had arrived.
        other_addresses: What had arrived.
    """

    def __init__(self, trunk: KVStore, attempt: int) -> None:
        super().__init__(trunk, f"attempt {attempt}")
        self.sent_address: bytes | None = None
        self.num_addresses = 0
        self.other_addresses: list[bytes] = []

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """See KVStore."""
        found = super().get_within(key, timeout_s)
        if found != self.sent_address:
            self.num_addresses += 1
            self.other_addresses.append(found)
        return found

    def set(self, key: str, value: bytes | str) -> None:
        """See KVStore."""
        self.sent_address = value.encode() if isinstance(value, str) else bytes(value)
        super().set(key, value)


def close_pairs(group: Any, rank: int, world_size: int) -> None:
    """Ends everything under way in a group at once; afterwards no buffer is read or written."""
    endless = torch.empty(1, dtype=torch.uint8)
    for other in range(world_size):  # all of them: the first may be gone already
        if other != rank:
            with suppress(RuntimeError):
                group.recv([endless], other, CLOSING_TAG).wait(CLOSING_TIMEOUT)


def form_proven(
    kv_store: KVStore, rank: int, world_size: int, *, host: str, credential: ChannelCredential, timeout_s: float
) -> tuple[Any, KVStore]:
    """Forms a gloo group whose ranks have all proved that they have the credential's secret.

    If a proof is missing, a stranger may have taken a number: all ranks form another group, on other ports.

    Args:
        kv_store: Rendezvous of all ranks.
        rank: This rank.
        world_size: Number of ranks.
        host: Address of the interface to listen on and connect from.
        credential: Secret and purpose of this group alone.
        timeout_s: Seconds for everything.

    Returns:
        The process group, and the store that must be kept as long as the group.

    Raises:
        ConnectError: It could not be formed. Nothing but proofs was sent.
    """
    attempts: list[_NotingStore] = []

    def end() -> None:
        kv_store.close()
        for each in attempts[-1:]:
            end_connecting(host, each.sent_address, each.other_addresses, rank, world_size)

    with note_forming(end):
        return _form(kv_store, rank, world_size, attempts, host=host, credential=credential, timeout_s=timeout_s)


def _form(
    kv_store: KVStore,
    rank: int,
    world_size: int,
    attempts: list[_NotingStore],
    *,
    host: str,
    credential: ChannelCredential,
    timeout_s: float,
) -> tuple[Any, KVStore]:
    """Forms a group as ``form_proven`` does; appends the rendezvous of each attempt to ``attempts``."""
    pid, end_s = os.getpid(), time.monotonic() + timeout_s
    unproven = ""
    proof_s, pause_s = FIRST_PROOF_S + PROOF_PER_RANK_S * world_size, FIRST_PAUSE_S
    for attempt in itertools.count():
        branch = _NotingStore(kv_store, attempt)
        attempts.append(branch)
        device = _find_device(host, pid)
        try:
            group = _connect(branch, rank, world_size, device, max(end_s - time.monotonic(), 0.001))
        except _FORMING_FAULTS as fault:
            note_unformed(host, pid)
            reason = f"gloo: {get_reason(fault)}"
            # A stranger's connection may have come before ours; a connection that does not come at all has another
            # cause.
            if not branch.num_addresses or attempt >= MAX_UNCONNECTED:
                before = f"; before, the other end did not prove itself: {unproven}" if unproven else ""
                raise ConnectError(address=host, reason=f"{reason}{before}") from fault
        else:
            try:
                prove(
                    group,
                    rank,
                    world_size,
                    credential,
                    attempt=attempt,
                    timeout_s=min(proof_s, end_s - time.monotonic()),
                )
                _await_proofs(kv_store, rank, world_size, attempt, timeout_s=end_s - time.monotonic())
                return group, branch
            except TransportError as fault:
                close_pairs(group, rank, world_size)
                raise ConnectError(address=host, reason=f"gloo: {fault}") from fault
            except RuntimeError as fault:
                close_pairs(group, rank, world_size)
                reason = str(fault) if isinstance(fault, UnprovenError) else f"no proof came: {get_reason(fault)}"
                unproven = reason
            del group
        kv_store.set(_name_outcome(attempt, rank), _FAILED)
        _leave(device, host, pid)
        del device
        if kv_store.is_closed or is_ending():
            raise ConnectError(address=host, reason="gloo: the session was closed while the connection was formed")
        refusals.note(credential.purpose, reason, branch.sent_address)
        if time.monotonic() + pause_s >= end_s:
            message = f"gloo: the other end did not prove itself in {attempt + 1} attempts: {reason}"
            raise ConnectError(address=host, reason=message)
        time.sleep(pause_s)
        proof_s, pause_s = min(2 * proof_s, max(LONGEST_PROOF_S, proof_s)), min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("there is always another attempt")


def _await_proofs(kv_store: KVStore, rank: int, world_size: int, attempt: int, *, timeout_s: float) -> None:
    """Tells the other ranks that this one has the proofs of all, and waits until each of them has.

    No last message over the connections could settle that: one rank would use a group that another, for which that
    message came too late, has given up.

    Raises:
        UnprovenError: A rank has given this attempt up.
        TransportError: There was no answer in time, or the session ended.
    """
    kv_store.set(_name_outcome(attempt, rank), _PROVEN)
    end_s = time.monotonic() + timeout_s
    for other in range(world_size):
        outcome = kv_store.get_within(_name_outcome(attempt, other), max(end_s - time.monotonic(), 0.001))
        if outcome != _PROVEN:
            raise UnprovenError(f"rank {other} did not get all proofs in time")


def _name_outcome(attempt: int, rank: int) -> str:
    return f"attempt {attempt}/outcome/{rank}"


def _find_device(host: str, pid: int) -> _GlooDevice:
    try:
        return get_gloo_device(host, pid)
    except _FORMING_FAULTS as fault:
        raise ConnectError(address=host, reason=f"gloo: {get_reason(fault)}") from fault


def _connect(kv_store: KVStore, rank: int, world_size: int, device: _GlooDevice, timeout_s: float) -> Any:
    options = make_gloo_options(device.device, timeout_s, num_threads=0)
    kv_store.timeout_s = timeout_s
    return dist.ProcessGroupGloo(kv_store, rank, world_size, options)
