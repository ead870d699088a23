"""Pulling versions of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    KeyNotFoundError,
    RemoteProtocolError,
    TDServeError,
    TransferAbortedError,
    VersionNotFoundError,
)
from tdserve.base.ids import check_store_name
from tdserve.base.integers import LARGEST, check_version
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.handles.key_paths import list_paths
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.pending import Pending, Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.download import receive_answer
from tdserve.client.transfers.read import receive_with_values
from tdserve.client.weights.deltas import HeldVersions, PartialVersion
from tdserve.client.weights.full_version import take_whole
from tdserve.client.weights.local_versions import GoneVersionError, RetiredVersionError, map_version
from tdserve.client.weights.lru_names import NewestNames
from tdserve.client.weights.module_destination import ModuleDestination, VersionDestination
from tdserve.client.weights.relay_taking import HopFailedError
from tdserve.client.weights.version_part import VersionPart, choose_part, number_leaves
from tdserve.messages.content import read_layout
from tdserve.structure.tensors.torch_types import FROM_TORCH, view_bytes
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import WIRE
from tdserve.structure.trees.tree import Path, Spec
from tdserve.structure.trees.version_subset import FLOATING, convert_floats, encode_numbers, select_leaves
from tdserve.v1 import control_pb2
from tdserve.values.value_codec import decode_value

MAX_RETIRED = 20
"""Versions that may be retired in a row, before a slow reader on this machine has opened them, or have another
structure than the one before, until its call fails. A call without waiting may continue to the next version, too."""


class Weights(NamedTuple):
    """One version of weights.

    Attributes:
        version: Grows by one with every publish.
        data: The tensordict, or the ``out=`` that was filled.
        metadata: As given by the publisher.
    """

    version: int
    data: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which version to get, and where to put it.

    Attributes:
        name: Name of the store.
        newer_than: Only a version above this one; None: any.
        version: This version instead of the newest.
        out: A tensordict to fill, or
        into: a module.
        select: Keys of the only leaves and nodes that are wanted; None: all.
        device: Where a new tensordict is moved.
        copy: Whether a local client copies it.
        dtype: To convert floating-point leaves to; "" leaves them.
        numpy: Whether a new tensordict is handed over as NumPy arrays; None is the client's setting.
    """

    name: str
    newer_than: int | None = None
    version: int | None = None
    out: Any = None
    into: nn.Module | None = None
    select: tuple[Path, ...] | None = None
    device: Any = None
    copy: bool = True
    dtype: str = ""
    numpy: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for contradictory arguments, or a version that is no number."""
        check_store_name(self.name)
        if self.out is not None and self.into is not None:
            raise InvalidRequestError(argument="into", reason="out= is given too")
        if self.into is not None and not isinstance(self.into, nn.Module):
            remedy = (
                "leave it out, and ask for new arrays with numpy=True" if isinstance(self.into, dict) else "use out="
            )
            reason = f"{type(self.into).__name__} is not an nn.Module; {remedy}"
            raise InvalidRequestError(argument="into", reason=reason)
        for argument, version in (("version", self.version), ("newer_than", self.newer_than)):
            if version is not None:
                check_version(argument, version)

    def name_version(self, error: VersionNotFoundError) -> VersionNotFoundError:
        """Returns the error with the version that was asked for, not the nearest that a message can hold."""
        _, _, rest = str(error.reason).partition(" ")
        return error.with_fields(reason=f"{self.version} {rest}")

    @property
    def has_place(self) -> bool:
        """Whether content goes to a place of the caller's."""
        return self.out is not None or self.into is not None

    def make_destination(self) -> Destination | None:
        """Returns the caller's place. Raises an error if nothing can be put there."""
        if self.into is not None:
            return ModuleDestination(self.into, store=self.name)
        return None if self.out is None else VersionDestination(self.out, store=self.name)

    def make_message(self, spec: Spec | None, holds: int, deadline: Deadline) -> control_pb2.LatestRequest:
        """Makes the message of a client that has this structure and this version."""
        return control_pb2.LatestRequest(
            store=self.name,
            newer_than=None if self.newer_than is None else min(max(self.newer_than, 0), LARGEST),
            version=None if self.version is None else min(max(self.version, 0), LARGEST),
            timeout_s=deadline.remaining_s,
            fingerprint=spec.fingerprint if spec is not None else b"",
            order=codec.compute_order(spec) if spec is not None else b"",
            holds=holds,
            dtype=WIRE[self.dtype] if self.dtype else 0,  # type: ignore[arg-type]
        )


def make_wanted(name: str, newer_than: int | None = None, *, dtype: Any, select: Any, **options: Any) -> Wanted:
    """Makes a ``Wanted`` of a caller's arguments. Raises InvalidRequestError for an invalid dtype or key."""
    chosen = None if select is None else tuple(list_paths(select, argument="select"))
    return Wanted(name, newer_than, dtype=get_dtype_name(dtype), select=chosen, **options)


class Pulls:
    """What the pulls of one client share. Threads: safe."""

    def __init__(self) -> None:
        self._known: NewestNames[Spec] = NewestNames()
        self._held = HeldVersions()

    def pull(self, client: SessionClient, wanted: Wanted, deadline: Deadline) -> Weights | None:
        """Gets a version for their client; None if there is nothing newer and the call does not wait; see
        ``Client.latest``."""
        wanted.check()
        attempt = _Attempt(client, wanted, self._known, self._held)
        try:
            found = client.call(attempt, deadline, store=wanted.name)
        except VersionNotFoundError as error:
            raise wanted.name_version(error) from None
        if found is None or wanted.has_place:
            return found
        return found._replace(data=client.hand_over(found.data, wanted.numpy, wanted.device))


def wait_newer(client: SessionClient, wanted: Wanted, deadline: Deadline) -> int | None:
    """Waits for a version without its content; returns its number, or None as ``Pulls.pull`` does.

    Raises:
        As ``Client.wait_newer``.
    """
    wanted.check()

    def attempt(session: Session, request: int, deadline: Deadline) -> int | None:
        pending = session.send(request, latest=_request_number(wanted, deadline))
        warn = partial(client.catalog.missing_names.warn, wanted.name)
        return _read_number(pending, wanted, deadline, on_slow=warn)

    return client.call(attempt, deadline, store=wanted.name)


def ask_newer(client: SessionClient, wanted: Wanted, deadline: Deadline) -> Callable[[], int | None]:
    """Asks for a version as ``wait_newer`` does, without a retry. Returns what waits for the answer; it does not refer
    to the client, whose end ends the wait with an error."""
    session, request = client.session(deadline), client.requests.take_number()
    pending = session.send(request, latest=_request_number(wanted, deadline))

    def wait() -> int | None:
        try:
            return _read_number(pending, wanted, deadline)
        finally:
            session.end_request(request)

    return wait


def _request_number(wanted: Wanted, deadline: Deadline) -> control_pb2.LatestRequest:
    message = wanted.make_message(None, 0, deadline)
    message.without_content = True
    return message


def _read_number(
    pending: Pending, wanted: Wanted, deadline: Deadline, *, on_slow: Callable[[float], None] | None = None
) -> int | None:
    what = f"a version of {wanted.name!r}"
    answer = pending.wait(compute_answer_timeout_s(deadline), what, on_slow=on_slow)
    return None if answer.done.nothing_newer else answer.done.version


class _OtherStructureError(TransferAbortedError):
    """The version has another structure than the client knew when it named leaves: none of them has come."""


class _Attempt:
    """One call, including its retries."""

    def __init__(
        self,
        client: SessionClient,
        wanted: Wanted,
        known: NewestNames[Spec],
        held: HeldVersions,
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._known = known
        self._held = held
        self._other_version = 0  # to be asked for instead of the newest, because its structure is known now
        # Checksums are those of the published dtypes, and what is held is a whole version.
        self._ignores_held = bool(wanted.dtype) or wanted.select is not None

    def __call__(self, session: Session, request: int, deadline: Deadline) -> Weights | None:
        failed: list[control_pb2.FailedHop] = []
        num_others, gone = 0, set[tuple[str, int]]()
        number = request
        while True:
            try:
                return self._ask(session, number, deadline, failed)
            except HopFailedError as error:  # the fault of another client, not of the session
                failed.append(error.failed)
            except (RetiredVersionError, _OtherStructureError) as error:
                num_others += 1
                if num_others == MAX_RETIRED:
                    raise
                if isinstance(error, GoneVersionError):
                    error.check_new(gone)
            except VersionNotFoundError:
                if not self._other_version:
                    raise
                self._other_version = 0  # it is not kept any more
            finally:
                if number != request:
                    session.end_request(number)
            number = self._client.requests.take_number()

    def _ask(
        self, session: Session, request: int, deadline: Deadline, failed: Sequence[control_pb2.FailedHop]
    ) -> Weights | None:
        wanted = self._wanted
        spec = self._known.get(wanted.name)
        holds = 0 if self._ignores_held else self._held.find_last(wanted.name, has_place=wanted.has_place)
        message = wanted.make_message(spec, holds, deadline)
        message.relays = True
        message.failed.extend(failed)
        is_named = self._name_leaves(message, spec)
        pending = session.send(request, latest=message)
        destination, mismatch = self._make_destination()  # while the server works
        warn = partial(self._client.catalog.missing_names.warn, wanted.name) if spec is None else None
        answer = pending.wait(compute_answer_timeout_s(deadline), f"a version of {wanted.name!r}", on_slow=warn)
        if answer.HasField("done") and answer.done.nothing_newer:
            if mismatch is not None:
                raise mismatch
            return None
        reply = Reply(request, pending, answer, deadline)
        accepted = reply.accepted
        if accepted.HasField("spec"):
            spec = codec.decode(accepted.spec)
            self._known.put(wanted.name, spec)
        if spec is None:
            raise RemoteProtocolError(expected=f"the structure of {wanted.name!r}", received="none")
        self._check_leaves(session, reply, spec, is_known=is_named and accepted.fingerprint == message.fingerprint)
        part = choose_part(convert_floats(spec, wanted.dtype), wanted.select, store=wanted.name)
        if accepted.path:  # this client opens the file
            if mismatch is not None:
                raise mismatch
            with session.movers.reads.locate(accepted.path, accepted.uid) as file:
                mapped = map_version(self._client, file, spec, part, accepted, destination, copy=wanted.copy)
            return self._make_weights(mapped, accepted)
        if accepted.checksums:
            content: Content | None = self._take_changed(session, reply, spec, destination, mismatch)
        else:
            content = take_whole(
                self._client,
                session,
                reply,
                part=part,
                destination=destination,
                mismatch=mismatch,
                device=wanted.device,
            )
        weights = self._make_weights(content, accepted)
        if part.wanted is spec:
            self._keep(weights, spec, destination)
        return weights

    def _name_leaves(self, message: control_pb2.LatestRequest, spec: Spec | None) -> bool:
        """Names the wanted leaves in a request, if only some are wanted; none if the known structure lacks one, or
        there is none. Returns whether it does."""
        part: VersionPart | None = None
        with suppress(KeyNotFoundError):
            part = None if spec is None else choose_part(spec, self._wanted.select, store=self._wanted.name)
        if self._wanted.select is not None:
            message.leaves = encode_numbers([] if spec is None or part is None else number_leaves(spec, part.wanted))
            message.without_values = part is None or not part.wanted.values
        if self._other_version:
            message.version = self._other_version
            message.ClearField("newer_than")
        return part is not None

    def _check_leaves(self, session: Session, reply: Reply, spec: Spec, *, is_known: bool) -> None:
        """Checks that the wanted leaves come.

        Args:
            spec: The structure of the version.
            is_known: Whether they were named by it.

        Raises:
            KeyNotFoundError: The version has no such key.
            _OtherStructureError: They can be named now.
        """
        if self._wanted.select is not None and not (is_known or reply.accepted.path):
            none = choose_part(spec, (), store=self._wanted.name)
            take_whole(self._client, session, reply, part=none, destination=None, mismatch=None)
            choose_part(spec, self._wanted.select, store=self._wanted.name)
            self._other_version = reply.accepted.version  # the newest may be of another structure again
            raise _OtherStructureError(transfer=reply.request, reason="versions change their structure too often")

    def _take_changed(
        self,
        session: Session,
        reply: Reply,
        spec: Spec,
        destination: Destination | None,
        mismatch: TDServeError | None,
    ) -> Content:
        """Receives the leaves that have changed, and checks whether the others still are what they were.

        Arguments and errors as in ``take_whole``.
        """
        accepted = reply.accepted
        held = self._held.find(self._wanted.name, destination) if mismatch is None else None
        part = PartialVersion(spec, accepted, held, destination)
        received, encoded = receive_with_values(self._client, session, reply, part.layout, into=part.into)
        leaves, stale = part.merge(received.get_leaves(), self._client.pool)
        if stale:
            self._fetch(spec, accepted.version, stale, leaves, reply.deadline)
            if part.find_wrong(leaves, stale):  # of another store of this name, by now
                self._ignores_held = True
                reason = f"version {accepted.version} of {self._wanted.name!r} was replaced while it was read"
                raise TransferAbortedError(transfer=0, reason=reason)
        built, values = decode_values(spec, encoded, allow_pickle=self._client.allow_pickle)
        if mismatch is not None:
            raise mismatch
        content = Content(built, leaves, values, accepted.version, accepted)
        if destination is not None:
            destination.check(spec)
            destination.finish(content, was_direct=part.into is not None)
        return content

    def _fetch(
        self, spec: Spec, version: int, numbers: list[int], leaves: dict[Path, torch.Tensor], deadline: Deadline
    ) -> None:
        """Gets single leaves of a version into their places, because those held here differ from the server's."""
        sent = select_leaves(spec, numbers)
        layout = read_layout(sent, is_packed=True)
        tensors = [leaves[slot.path] for slot in layout.slots[: layout.num_leaves]]
        into = Leaves(tensors, [view_bytes(tensor).numpy() for tensor in tensors])
        asked = Wanted(self._wanted.name, version=version)

        def attempt(session: Session, request: int, deadline: Deadline) -> None:
            message = asked.make_message(spec, 0, deadline)
            message.leaves, message.without_values = encode_numbers(numbers), True
            pending = session.send(request, latest=message)
            answer = pending.wait(compute_answer_timeout_s(deadline), f"leaves of {asked.name!r}")
            reply = Reply(request, pending, answer, deadline)
            if reply.accepted.path:
                raise TransferAbortedError(transfer=0, reason="the session is another by now")
            receive_answer(layout, session, reply, pool=self._client.pool, into=into)

        try:
            self._client.call(attempt, deadline)
        except InvalidRequestError as error:  # the version is gone: get all of the newest
            self._ignores_held = True
            raise TransferAbortedError(transfer=0, reason=str(error)) from error

    def _make_destination(self) -> tuple[Destination | None, TDServeError | None]:
        """Returns where a version goes, or why it cannot go there; content that is under way is received first."""
        try:
            return self._wanted.make_destination(), None
        except TDServeError as error:
            return None, error

    def _make_weights(self, content: Content | None, accepted: control_pb2.Accepted) -> Weights:
        wanted = self._wanted
        data: Any = wanted.out if wanted.into is None else wanted.into
        if data is None and content is not None:
            data = content.build(wanted.device)
        return Weights(accepted.version, data, decode_value(accepted.metadata) if accepted.metadata else {})

    def _keep(self, weights: Weights, spec: Spec, destination: Destination | None) -> None:
        """Remembers what is held now, unless it is on a device."""
        is_elsewhere = destination is None and self._wanted.device is not None
        if not is_elsewhere:
            td = weights.data if destination is None else None
            self._held.keep(self._wanted.name, weights.version, spec, destination=destination, td=td)


def get_dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype to convert to; "" for None.

    Raises:
        InvalidRequestError: It is not a floating-point dtype.
    """
    if dtype is None:
        return ""
    name = FROM_TORCH.get(dtype, "") if isinstance(dtype, torch.dtype) else ""
    if name not in FLOATING:
        raise InvalidRequestError(
            argument="dtype", reason=f"it must be one of {', '.join(FLOATING)} of torch, got {dtype!r}"
        )
    return name
