"""Gloo groups whose ranks have proved to each other that they belong together.

Facts this file rests on, measured with torch 2.13 on Linux:

* ``ProcessGroupGloo`` built directly on a ``Store`` leaves the user's default group, ``MASTER_ADDR`` and so on alone.
* A Python subclass of ``Store`` serves as rendezvous, if a reference to it is kept.
* A group runs collectives in threads of its own, one pair of them by default. It needs none for sends and receives, so
  it has none here.
* A device listens on a port of its own, in a thread of its own, and has four descriptors; making one takes half a
  millisecond. It keeps every connection that nobody waits for as long as it lives.
* A connection belongs to the pair whose number it tells, the first one that tells it. So a stranger who is quicker than
  the peer becomes the peer, and what he sends may end the process (SIGABRT) before any proof is asked for.
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

from tdserve.base.errors import ConnectError
from tdserve.transport.distributed_private import gloo_options
from tdserve.transport.proving import Bond, UnprovenError, prove
from tdserve.transport.rendezvous import Branch, KVStore
from tdserve.transport.strangers import describe_connections

CLOSING_TAG = 0
"""No request has this number: a receive under it never ends."""

CLOSING_TIMEOUT = timedelta(milliseconds=1)
"""Of the receive whose end in vain closes a pair."""

FIRST_PROOF_S = 1.0
LONGEST_PROOF_S = 3.0
"""For the proofs of a group that is connected: they take a quarter of a millisecond. Each attempt has twice the time of
the one before, for machines with much else to do."""

PROOF_PER_RANK_S = 0.05
"""More for each rank of a group."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
"""Between two attempts: who takes number after number makes no process busy."""

MAX_UNCONNECTED = 3
"""Attempts that may fail before the ranks are connected."""

LOG_INTERVAL_S = 10.0
"""Between two lines about groups whose ranks could not prove themselves."""

MAX_UNFORMED = 16
"""Groups that do not form on a device, before others get a new one. gloo keeps a connection that comes for a pair which
was given up meanwhile, and its descriptor, as long as the device that it came to (measured)."""

_MAX_DEVICES = 16

_FORMING_FAULTS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError, ConnectError)
"""What gloo's own exceptions become in Python: it takes the peer's address apart without looking at it first."""

_log = logging.getLogger("tdserve.transport")


class _Device:
    def __init__(self, host: str) -> None:
        self.device = dist.ProcessGroupGloo.create_device(hostname=host)
        self.num_unformed = 0


class _Refusals:
    """How many groups did not prove themselves in this process; of many, few are logged."""

    def __init__(self) -> None:
        self.num = 0
        self._num_logged = 0
        self._logged_s = -LOG_INTERVAL_S

    def note(self, purpose: str, reason: str, address: bytes | None) -> None:
        """One more."""
        self.num += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s, num_new, self._num_logged = now_s, self.num - self._num_logged, self.num
        _log.warning(
            "the gloo connection for %s was refused (%s; %d since the last such line). A stranger may have come first: "
            "%s. Another port is tried. The ports of gloo belong in a trusted network",
            purpose,
            reason,
            num_new,
            describe_connections(address),
        )


refusals = _Refusals()
_devices: dict[tuple[str, int], _Device] = {}  # no lock, which a fork could find taken: one operation at a time will do


def gloo_device(host: str, pid: int) -> _Device:
    """One gloo device (one thread, one event loop) per address and process: a hundred groups share it."""
    found = _devices.get((host, pid))
    if found is None:
        if len(_devices) >= _MAX_DEVICES:
            _devices.pop(next(iter(_devices)), None)
        found = _devices.setdefault((host, pid), _Device(host))
    return found


def note_unformed(host: str, pid: int) -> None:
    """A group did not form on the device of this address; after some of them the device goes with its last group."""
    found = _devices.get((host, pid))
    if found is not None:
        found.num_unformed += 1
        if found.num_unformed >= MAX_UNFORMED:
            _devices.pop((host, pid), None)


def leave_all_devices() -> None:
    """The next groups get other devices; those of now go with their last groups."""
    _devices.clear()


def _leave(device: _Device, host: str, pid: int) -> None:
    """The next group gets another device, whose port and numbers no stranger knows."""
    if _devices.get((host, pid)) is device:
        _devices.pop((host, pid), None)


class _NotingStore(Branch):
    """The rendezvous of one attempt.

    Attributes:
        told: What this rank has told of itself.
        num_heard: How often another rank's address was asked for, and had come.
    """

    def __init__(self, trunk: KVStore, attempt: int) -> None:
        super().__init__(trunk, f"attempt {attempt}")
        self.told: bytes | None = None
        self.num_heard = 0

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """As of KVStore."""
        found = super().get_within(key, timeout_s)
        self.num_heard += found != self.told
        return found

    def set(self, key: str, value: bytes | str) -> None:
        """As of KVStore."""
        self.told = value.encode() if isinstance(value, str) else bytes(value)
        super().set(key, value)


def close_pairs(group: Any, rank: int, world_size: int) -> None:
    """Ends everything under way in a group, at once: afterwards no buffer is read or written any more."""
    endless = torch.empty(1, dtype=torch.uint8)
    for other in range(world_size):  # all: the first of them may have gone before
        if other != rank:
            with suppress(RuntimeError):
                group.recv([endless], other, CLOSING_TAG).wait(CLOSING_TIMEOUT)


def form_proven(
    kv_store: KVStore, rank: int, world_size: int, *, host: str, bond: Bond, timeout_s: float
) -> tuple[Any, KVStore]:
    """Forms a gloo group all of whose ranks have proved that they know the bond's secret.

    Where one of them does not, a stranger may have taken its number: all ranks form another group, on other ports.

    Args:
        kv_store: Rendezvous of all ranks.
        rank: This one's.
        world_size: Ranks of the group.
        host: Address of the interface to listen on and connect from.
        bond: Of this group alone.
        timeout_s: Seconds for all of it.

    Returns:
        The process group, and the store that must be kept as long.

    Raises:
        ConnectError: It could not be formed. Nothing was sent but proofs.
    """
    pid, end_s = os.getpid(), time.monotonic() + timeout_s
    proof_s, pause_s = FIRST_PROOF_S + PROOF_PER_RANK_S * world_size, FIRST_PAUSE_S
    for attempt in itertools.count():
        branch = _NotingStore(kv_store, attempt)
        device = _device_at(host, pid)
        try:
            group = _connect(branch, rank, world_size, device, max(end_s - time.monotonic(), 0.001))
        except _FORMING_FAULTS as fault:
            note_unformed(host, pid)
            reason = f"gloo: {_first_line(fault)}"
            # A stranger's connection may have come before ours; but what does not come at all is another matter.
            if not branch.num_heard or attempt >= MAX_UNCONNECTED:
                raise ConnectError(address=host, reason=reason) from fault
        else:
            try:
                prove(group, rank, world_size, bond, attempt=attempt, timeout_s=min(proof_s, end_s - time.monotonic()))
                return group, branch
            except RuntimeError as fault:
                close_pairs(group, rank, world_size)
                reason = str(fault) if isinstance(fault, UnprovenError) else f"no proof came: {_first_line(fault)}"
            del group
        _leave(device, host, pid)
        del device
        if kv_store.is_closed:
            raise ConnectError(address=host, reason="gloo: the session was closed while the connection was formed")
        refusals.note(bond.purpose, reason, branch.told)
        if time.monotonic() + pause_s >= end_s:
            told = f"gloo: the other end did not prove itself in {attempt + 1} attempts: {reason}"
            raise ConnectError(address=host, reason=told)
        time.sleep(pause_s)
        proof_s, pause_s = min(2 * proof_s, max(LONGEST_PROOF_S, proof_s)), min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("there is always another attempt")


def _device_at(host: str, pid: int) -> _Device:
    try:
        return gloo_device(host, pid)
    except _FORMING_FAULTS as fault:
        raise ConnectError(address=host, reason=f"gloo: {_first_line(fault)}") from fault


def _connect(kv_store: KVStore, rank: int, world_size: int, device: _Device, timeout_s: float) -> Any:
    options = gloo_options(device.device, timeout_s, num_threads=0)
    kv_store.timeout_s = timeout_s
    return dist.ProcessGroupGloo(kv_store, rank, world_size, options)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
