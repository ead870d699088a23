"""Publishing by all ranks of a process group: each its own pieces, and the first one the index."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    StoreNotCreatedError,
    StoreNotFoundError,
    TDServeError,
    TransferAbortedError,
    TransportError,
    WrongStateError,
)
from tdserve.base.ids import check_store_name
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.catalog.description import VersionInfo
from tdserve.client.weights.module_misfits import SHARDED
from tdserve.client.weights.pulls import get_dtype_name
from tdserve.dtensor.publish_plan import OwnPiece, PublishPlan, find_plan, keep_plan, make_plan
from tdserve.dtensor.sharded_index import PartVersion, RankLeaf, encode_index, name_part
from tdserve.dtensor.state_leaves import StateLeaves, collect_leaves
from tdserve.structure.trees.version_subset import FLOATING

UNCLEAR = (DeadlineExceededError, TransportError, ClosedError)
"""Errors of a request that the server may have done, or may still do."""

_Result = TypeVar("_Result")


class Ranks:
    """The ranks that publish together.

    Args:
        group: Their process group; None is the default one, or this process alone if there is none.

    Raises:
        WrongStateError: This process is not in the group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_alone = group is None and not dist.is_initialized()
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self.size = 1 if self._is_alone else dist.get_world_size(group)
        if self.rank < 0:
            raise WrongStateError(state="this process is not in the group", event="tdserve.dtensor.publish")

    def exchange(
        self,
        step: Callable[[], _Result],
        deadline: Deadline,
        *,
        outcome: str = "the last version is the newest as before",
    ) -> list[_Result]:
        """Makes a step in each rank, whose calls have this deadline, and returns the results of all, by rank.

        Args:
            outcome: What holds if a rank raises, for the errors of the others.

        Raises:
            TransferAbortedError: Another rank has raised an error in its step, which the error quotes; that rank
                raises its own.
        """
        found: _Result | None = None
        error: Exception | None = None
        try:
            with within(deadline):
                found = step()
        except Exception as raised:  # noqa: BLE001 (the others wait for this rank)
            error = raised
        own = (found, "" if error is None else f"{type(error).__name__}: {error}")
        every: list[Any] = [own]
        if not self._is_alone:
            every = [None] * self.size
            dist.all_gather_object(every, own, group=self._group)
        if error is not None:
            raise error
        fault = next((f"rank {rank} has raised {text}" for rank, (_, text) in enumerate(every) if text), "")
        if fault:
            raise TransferAbortedError(reason=f"{fault}; {outcome}")
        return [result for result, _ in every]


@dataclass(frozen=True)
class _RankState:
    """What a rank has; the first one also decides what all need.

    Attributes:
        plan: Identity of the plan that this rank has kept for its leaves; "" if there is none.
        leaves: The leaves, unless there is a plan.
        publication: Identity of the publish.
        needed: The oldest version of each part that a readable version needs.
    """

    plan: str = ""
    leaves: Mapping[str, RankLeaf] | None = None
    publication: str = ""
    needed: Mapping[str, int] | None = None


class ShardedPublish:
    """One publish, as seen by one rank."""

    def __init__(
        self,
        client: Client | ClusterClient,
        name: str,
        ranks: Ranks,
        *,
        keep: int,
        metadata: Any,
        dtype: Any,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._name = name
        self._ranks = ranks
        self._keep = keep
        self._metadata = metadata
        self._dtype = dtype
        self._deadline = deadline

    def run(self, content: Any) -> int:
        """Publishes content; see ``tdserve.dtensor.publish``."""
        state, leaves = StateLeaves(), dict[str, RankLeaf]()
        plan: PublishPlan | None = None

        def describe() -> _RankState:
            nonlocal state, leaves, plan
            check_client(self._client)
            check_store_name(name_part(self._name, self._ranks.size))
            state = collect_leaves(content, store=self._name)
            leaves = _list_leaves(state, get_dtype_name(self._dtype))
            plan = find_plan(self._client, self._name, leaves, self._ranks.rank, self._ranks.size)
            return self._add_decisions(_RankState(plan.identity) if plan is not None else _RankState(leaves=leaves))

        ranks = self._ranks.exchange(describe, self._deadline)
        first = ranks[0]
        if plan is None or any(each.plan != plan.identity for each in ranks):
            plan = None
            every = [each.leaves for each in ranks if each.leaves is not None]
            if len(every) < len(ranks):  # some had a plan, and others not, or another
                every = self._ranks.exchange(lambda: leaves, self._deadline)

        def publish_part() -> PartVersion:
            nonlocal plan
            if plan is None:
                plan = make_plan(every, self._ranks.rank, first.publication, store=self._name)
                keep_plan(self._client, self._name, plan)
            return self._publish_part(state, plan.own, first)

        parts = self._ranks.exchange(publish_part, self._deadline)

        def publish_index() -> int:
            if self._ranks.rank or plan is None:
                return 0
            return self._publish_index(encode_index(first.publication, parts, plan.indexed), state, first, parts)

        outcome = "unless that says otherwise, the last version is the newest as before"
        return self._ranks.exchange(publish_index, self._deadline, outcome=outcome)[0]

    def _add_decisions(self, state: _RankState) -> _RankState:
        """Adds what the first rank decides."""
        if self._ranks.rank:
            return state
        if not isinstance(self._metadata or {}, Mapping):
            reason = f"a {type(self._metadata).__name__} is no dict"
            raise InvalidRequestError(argument="metadata", reason=reason)
        if SHARDED in (self._metadata or {}):
            raise InvalidRequestError(argument="metadata", reason=f"the key {SHARDED!r} is tdserve's own")
        needed: dict[str, int] = {}
        for found in self._list_versions(self._name):
            for part, version in list_parts(found, self._name).items():
                needed[part] = min(version, needed.get(part, version))
        return replace(state, publication=secrets.token_hex(8), needed=needed)

    def _list_versions(self, name: str) -> Sequence[VersionInfo]:
        try:
            return self._client.describe(name).versions
        except StoreNotFoundError:
            return ()

    def _publish_part(self, state: StateLeaves, pieces: Sequence[OwnPiece], first: _RankState) -> PartVersion:
        """Publishes the pieces of this rank; version 0 if there are none."""
        part = name_part(self._name, self._ranks.rank)
        held = {name: dict(leaf.held) for name, leaf in state.leaves.items()}
        own: dict[str, Any] = {piece.key: held[piece.leaf][piece.region] for piece in pieces}
        if not own:
            return PartVersion(part, 0, 0)
        # Versions of publishes that failed count too, so no fixed number would do.
        oldest = (first.needed or {}).get(part)
        kept = [] if oldest is None else [each for each in self._list_versions(part) if each.version >= oldest]
        version = self._client.publish(
            part,
            TensorDict(own),
            metadata={SHARDED: {"publication": first.publication}},
            keep=max(len(kept) + 1, 2),
            dtype=self._dtype,
        )
        return PartVersion(part, version, len(own))

    def _publish_index(self, index: str, state: StateLeaves, first: _RankState, parts: Sequence[PartVersion]) -> int:
        used = {str(rank): part.version for rank, part in enumerate(parts) if part.version}
        content: dict[str, Any] = {"index": index}
        if state.values:
            content["values"] = state.values
        mark = {"publication": first.publication, "parts": used}
        metadata = {**(self._metadata or {}), SHARDED: mark}
        try:
            version: int = self._client.publish(self._name, {SHARDED: content}, metadata=metadata, keep=self._keep)
        except StoreNotCreatedError:
            raise
        except UNCLEAR as error:
            found = self._find_version(first.publication)
            if found is None:
                raise _make_unclear_error(error, self._name) from error
            version = found
        self._delete_parts({*(first.needed or {})} - {part.name for part in parts if part.version})
        return version

    def _find_version(self, publication: str) -> int | None:
        """Finds the version of a publish whose outcome is unclear; None if it is not seen in time."""
        with suppress(TDServeError):
            versions = self._list_versions(self._name)
            return next((each.version for each in versions if read_publication(each.metadata) == publication), None)
        return None

    def _delete_parts(self, before: set[str]) -> None:
        """Deletes parts of ranks that there are no more, unless a readable version needs them.

        The version is visible by now, so nothing is raised: what is left only takes room.
        """
        with suppress(TDServeError):
            before |= {*list_stored_parts(self._client, self._name, self._ranks.size)}
            if not before:
                return
            before -= {part for found in self._list_versions(self._name) for part in list_parts(found, self._name)}
            for part in before:
                with suppress(StoreNotFoundError):
                    self._client.delete(part)


def _list_leaves(state: StateLeaves, dtype: str) -> dict[str, RankLeaf]:
    """Returns what a rank has to publish, with floating-point tensors in a dtype; "" leaves theirs."""
    return {
        name: RankLeaf(
            dtype if dtype and leaf.dtype in FLOATING else leaf.dtype,
            leaf.shape,
            leaf.is_sharded,
            [region for region, _ in leaf.held],
        )
        for name, leaf in state.leaves.items()
    }


def _make_unclear_error(error: TDServeError, name: str) -> TDServeError:
    said = f"the version may be there all the same, or come yet: client.versions({name!r}) lists it then"
    if isinstance(error, DeadlineExceededError):
        timeout_s = error.fields["timeout_s"]
        return DeadlineExceededError(what=f"the publish of the index of {name!r} ({said})", timeout_s=timeout_s)
    if "reason" in error.fields:
        return error.with_fields(reason=f"{error.fields['reason']}; {said}")
    return TransferAbortedError(reason=f"{error}; {said}")


def check_client(client: Any) -> None:
    """Checks that a client is one whose calls return when they are done.

    Raises:
        InvalidRequestError: It is another, such as one of ``tdserve.aio``.
    """
    if not isinstance(client, (Client, ClusterClient)):
        reason = f"a {type(client).__name__} does not do; give what tdserve.connect returns"
        raise InvalidRequestError(
            argument="client", reason=f"{reason}; tdserve.aio.dtensor takes a client of tdserve.aio"
        )


def list_stored_parts(client: Client | ClusterClient, name: str, first_rank: int = 0) -> list[str]:
    """Returns the names of the parts that are stored, from that of a rank up to the first name that is free.

    Parts stay when ``Client.delete`` deletes the version that has their index, or ``Client.publish`` retires it.
    """
    found: list[str] = []
    for rank in count(first_rank):
        part = name_part(name, rank)
        try:
            versions = client.describe(part).versions
        except StoreNotFoundError:
            break
        if any(is_part(each.metadata) for each in versions):  # a store of the user's may have such a name
            found.append(part)
    return found


def list_parts(found: VersionInfo, name: str) -> dict[str, int]:
    """Returns which versions of which parts a sharded version needs; none of another."""
    mark = found.metadata.get(SHARDED)
    parts: Any = mark.get("parts") if isinstance(mark, dict) else None
    return {name_part(name, int(rank)): version for rank, version in (parts or {}).items() if rank.isdecimal()}


def read_publication(metadata: Mapping[str, Any]) -> str:
    """Returns the identity of the publish that a version of a part, or an index, belongs to; "" if it is neither."""
    mark = metadata.get(SHARDED)
    return str(mark.get("publication", "")) if isinstance(mark, dict) else ""


def is_part(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a version is a part, by its metadata; an index names its publish, too."""
    return bool(read_publication(metadata)) and "parts" not in metadata[SHARDED]
