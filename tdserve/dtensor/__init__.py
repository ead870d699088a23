"""Weights of sharded trainers: DTensors, as from FSDP2 and tensor parallelism, published and read with any placements.

>>> from tdserve import dtensor
>>> version = dtensor.publish(client, "policy", model)  # in every rank: each sends its own shards
>>> dtensor.latest(client, "policy", into=other_model)  # in any process: it reads what it needs of them
>>> for weights in dtensor.subscribe(client, "policy", into=other_model): ...  # each version that comes

A version of ``policy`` is an index. The shards are versions of ``policy.part-0``, ``policy.part-1`` and so on, one for
each rank that publishes; so they are spread over the servers of a cluster.

Read ``sharded_publish`` first, with ``publish_plan``, then ``sharded_index`` and ``sharded_reads``. ``shard_regions``
and ``state_leaves`` say what a process has, ``sharded_misfits`` what does not fit.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, SpecMismatchError, StoreNotFoundError, TDServeError
from tdserve.base.ids import check_store_name
from tdserve.base.integers import check_version
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.session.calls.call_deadline import begin_call, within
from tdserve.client.weights.pulls import Weights
from tdserve.client.weights.subscription import Subscription
from tdserve.dtensor.sharded_publish import Ranks, ShardedPublish, check_client, list_stored_parts
from tdserve.dtensor.sharded_reads import GONE, check_fit, find_newest, find_version, read_into
from tdserve.dtensor.state_leaves import StateLeaves, collect_leaves

__all__ = ["delete", "latest", "publish", "subscribe", "version"]

AnyClient = Client | ClusterClient


def publish(
    client: AnyClient,
    name: str,
    content: Any,
    *,
    group: Any = None,
    metadata: dict[str, Any] | None = None,
    keep: int = 0,
    dtype: Any = None,
    timeout_s: float | None = None,
) -> int:
    """Publishes the next version of sharded weights. Every rank of the group calls it, with a client of its own.

    Each rank sends its own shards, and of a replica one rank does. Once all are stored, rank 0 publishes the version,
    so that it becomes visible as a whole. If a rank raises, so do all, and the last version stays the newest. Only if
    the outcome of this last request is unknown, or a rank ends meanwhile, the version may be there all the same: then
    the errors of tdserve say so. A rank that has ended is noticed by the process group, within the group's timeout.

    Args:
        client: A client of the same server, or cluster, in every rank.
        name: Name of the weights. Their parts are named after it: ``policy.part-0``.
        content: A module, or a dict, nested or flat, or TensorDict, whose tensors are DTensors or plain. Of a plain one
            the first rank that has it publishes its own. Ranks may have different leaves, as pipeline stages do. What
            is no tensor is taken from rank 0.
        group: The process group; None is the default one, or this process alone if there is none.
        metadata: Metadata of rank 0, as in ``Client.publish``.
        keep: How many of the newest versions stay readable, as in ``Client.publish``. Of the parts one more is kept,
            for readers that have just found the oldest.
        dtype: Floating-point tensors, except those of 8 bits, are converted to it before they are sent: each rank
            makes a copy in it of what it sends, and no more. The same in all ranks.
        timeout_s: For this rank's requests; the others are waited for as long as the group does.

    Returns:
        The version, in every rank.

    Raises:
        NotSupportedError: A leaf is ``Partial``, or cannot be sent. Nothing was published.
        SpecMismatchError: Ranks differ in a leaf, or together lack some of it. Nothing was published.
        TransferAbortedError: Another rank has raised an error, which this one quotes.
        DeadlineExceededError, TransportError: There was no answer in time. If the text says that the version may be
            there, the parts are stored, and only rank 0's last request was not answered.
        Others: As raised by ``Client.publish``.
    """
    ranks = Ranks(group)
    deadline = _make_deadline(client, timeout_s)
    return ShardedPublish(client, name, ranks, keep=keep, metadata=metadata, dtype=dtype, deadline=deadline).run(
        content
    )


def latest(
    client: AnyClient,
    name: str,
    *,
    into: Any,
    newer_than: int | None = None,
    timeout_s: float | None = None,
    strict: bool = True,
) -> Weights | None:
    """Fills tensors with the newest version of some weights, whatever the placements of both; no collective.

    Only the pieces that overlap this process's shards are read. They are copied once all are there, so a version is
    never mixed with another. Until then they take memory: over shared memory none, as the versions' files are mapped;
    over other transports at most twice that of the shards here, and half a gibibyte (or eight of the largest pieces).

    Args:
        client: The client.
        name: Name of the weights: published by ``publish`` here, or by ``Client.publish`` as a whole.
        into: A module, or a dict or TensorDict with the leaves of the version: DTensors of any mesh and placements, or
            plain tensors, which get the whole. They are filled in place; floating-point numbers are converted, except
            those of 8 bits. What is no tensor is replaced by what the version has of that name, if it has; a number
            also fills a tensor without dimensions.
        newer_than: Waits for a version above this one. Without it, the newest whose parts are all there is read.
        timeout_s: For the whole call; with 0 and nothing newer, None is returned.
        strict: False reads only the tensors that ``into`` has, such as those of a pipeline stage. What is no tensor
            may be missing on either side anyway.

    Returns:
        Version, ``into`` and metadata.

    Raises:
        DeadlineExceededError: There was no such version in time.
        SpecMismatchError: ``into`` does not fit; nothing was written to it.
        NotSupportedError: A leaf of it cannot be filled; nothing was written.
        VersionNotFoundError, StoreNotFoundError: A part of the newest version is not there any more, no older one is
            whole, or may be read, and no newer one came in time.
        Others: As raised by ``Client.latest``.
    """
    check_client(client)
    deadline = _make_deadline(client, timeout_s)
    return _read_newest(client, name, newer_than, deadline, deadline, into=into, strict=strict)


def subscribe(
    client: AnyClient,
    name: str,
    *,
    into: Any,
    newer_than: int | None = None,
    timeout_s: float | None = None,
    strict: bool = True,
) -> Subscription:
    """Follows some weights, as ``Client.subscribe`` does: each step fills ``into`` with the newest version above the
    last one, as ``latest`` does; no collective, so the steps of several processes may bring different versions.

    A step that finds that a part is gone waits for the next version. A version that does not fit is raised again by
    each step, until there is another.

    Args:
        client: The client.
        name: Name of the weights.
        into: As in ``latest``.
        newer_than: Begins above this version.
        timeout_s: For each wait, which ends in DeadlineExceededError; the next step waits again. ``math.inf`` waits
            without end.
        strict: As in ``latest``.

    Raises:
        InvalidRequestError, NotSupportedError: ``into`` cannot be filled. The steps raise as ``latest`` does.
    """
    check_client(client)
    check_store_name(name)
    if newer_than is not None:
        check_version("newer_than", newer_than)
    collect_leaves(into, store=name, is_destination=True)

    def pull(newer_than: int | None, step: Deadline, deadline: Deadline) -> Weights | None:
        return _read_newest(client, name, newer_than, step, deadline, into=into, strict=strict)

    return Subscription(name, pull, partial(_make_deadline, client, timeout_s), newer_than=newer_than)


def _read_newest(
    client: AnyClient,
    name: str,
    newer_than: int | None,
    step: Deadline,
    deadline: Deadline,
    *,
    into: Any,
    strict: bool,
) -> Weights | None:
    """Waits for a version until ``step``, which may be the deadline, and reads it; see ``latest``."""
    state = collect_leaves(into, store=name, is_destination=True)
    lost: TDServeError | None = None
    while True:
        try:
            with within(step):
                found = find_newest(client, name, newer_than)
        except DeadlineExceededError:
            if lost is None or step is not deadline:
                raise
            found = None
        if found is None:
            if lost is not None and step is deadline:
                raise lost
            return None
        check_fit(found.contents, state, into=into, store=name, strict=strict)
        try:
            read_into(client, found, state, deadline)
        except GONE as error:
            if newer_than is None:
                whole = _read_whole(client, name, state, deadline, into=into, strict=strict)
                if whole is not None:
                    return whole
            lost, newer_than = error, found.version  # this one does not come back
            continue
        return Weights(found.version, into, found.metadata)


def _read_whole(
    client: AnyClient, name: str, state: StateLeaves, deadline: Deadline, *, into: Any, strict: bool
) -> Weights | None:
    """Reads the newest version whose parts are all there; None if there is none that fits.

    One that is not may stay the newest: after a restore of several servers, whose checkpoints are of several moments.
    """
    with within(deadline):
        versions = client.describe(name).versions
    for each in sorted(versions, key=lambda info: -info.version):
        with suppress(*GONE, SpecMismatchError):
            with within(deadline):
                found = find_version(client, name, each.version)
            check_fit(found.contents, state, into=into, store=name, strict=strict)
            read_into(client, found, state, deadline)
            return Weights(found.version, into, found.metadata)
    return None


def version(
    client: AnyClient, name: str, v: int, *, into: Any, timeout_s: float | None = None, strict: bool = True
) -> Weights:
    """Fills tensors with a certain version of some weights, if it is still kept; arguments as in ``latest``.

    Raises:
        VersionNotFoundError: It is not kept any more, or not published yet. One that was published as a whole, by
            ``Client.publish``, is read only as long as it is the newest.
        Others: As raised by ``latest``.
    """
    check_client(client)
    deadline = _make_deadline(client, timeout_s)
    state = collect_leaves(into, store=name, is_destination=True)
    with within(deadline):
        found = find_version(client, name, v)
    check_fit(found.contents, state, into=into, store=name, strict=strict)
    read_into(client, found, state, deadline)
    return Weights(found.version, into, found.metadata)


def delete(client: AnyClient, name: str) -> None:
    """Deletes sharded weights and their parts; one process calls it. ``Client.delete`` leaves the parts.

    Raises:
        StoreNotFoundError: There are neither weights nor parts of this name.
    """
    check_client(client)
    parts = list_stored_parts(client, name)
    try:
        client.delete(name)
    except StoreNotFoundError:
        if not parts:
            raise
    for part in parts:
        with suppress(StoreNotFoundError):
            client.delete(part)


def _make_deadline(client: AnyClient, timeout_s: float | None) -> Deadline:
    # A client of another kind, which the calls below refuse by name, may have no timeout.
    return begin_call(timeout_s, getattr(client, "timeout_s", 0.0))
