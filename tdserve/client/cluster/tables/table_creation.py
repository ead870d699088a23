"""Creation of tables that several servers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.client.client import Client
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.stores.part_creation import create_parts
from tdserve.client.handles.key_paths import check_path
from tdserve.rules.placement import OnShardLoss, PlacementKind, PlacementRecord, name_part
from tdserve.rules.replay.settings import Settings, make_queue_settings, make_replay_settings

_QUEUE_SETTINGS = ("sampler", "policy")
_REPLAY_SETTINGS = (*_QUEUE_SETTINGS, "remover", "limiter", "min_size", "max_times_sampled", "consumers")
"""Options of a creation that are settings of the whole table."""


def create_sharded_table(
    cluster: ClusterServers,
    kind: PlacementKind,
    name: str,
    like: Any,
    capacity: int,
    servers: tuple[int, ...],
    options: Mapping[str, Any],
    *,
    shard_by: Any,
    on_shard_loss: OnShardLoss,
) -> None:
    """Creates a replay or queue of several servers; see ``ClusterClient.create_replay``.

    Raises:
        TypeError: One server has no such option. Nothing was recorded, as with all options that are refused here.
    """
    is_queue = kind == "queue"
    _check_names(Client.create_queue if is_queue else Client.create_replay, options)
    left = dict(options)  # what concerns the whole table is taken out of it, and the parts get the rest
    capacity = check_integer("max_size" if is_queue else "capacity", capacity, len(servers))
    exists_ok = bool(left.pop("exists_ok", False) | left.pop("existsok", False))
    settings = _make_settings(capacity, left, is_queue=is_queue)
    settings.check(capacity)
    key = () if shard_by is None else check_path(shard_by, argument="shard_by")
    if key and not _has_key(like, key):
        raise InvalidRequestError(argument="shard_by", reason=f"rows like this have no key {'.'.join(key)!r}")
    placement = PlacementRecord(kind, servers, settings.to_json(), capacity, on_shard_loss, key)
    settings.sampler.check(placement.part_capacity)
    part_options = {**left, **_make_part_settings(settings, placement.num_shards), "exists_ok": True}

    def create_part(shard: int, client: Client) -> None:
        create = client.create_queue if is_queue else client.create_replay
        create(name_part(name, shard), like, placement.part_capacity, **part_options)

    create_parts(cluster, name, placement, create_part, exists_ok=exists_ok)


def _check_names(create: Callable[..., Any], options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in signature(create).parameters]
    if unknown:
        raise TypeError(f"{create.__qualname__}() got an unexpected keyword argument {unknown[0]!r}")


def _has_key(like: Any, key: tuple[str, ...]) -> bool:
    for part in key:
        like = like.get(part, None) if hasattr(like, "get") else None
    return like is not None


def _make_settings(capacity: int, options: dict[str, Any], *, is_queue: bool) -> Settings:
    """Takes the settings of a whole table out of the options of its creation."""
    names = _QUEUE_SETTINGS if is_queue else _REPLAY_SETTINGS
    given = {name: options.pop(name) for name in names if name in options}
    make = make_queue_settings if is_queue else make_replay_settings
    return make(capacity, **given)


def _make_part_settings(settings: Settings, num_shards: int) -> dict[str, Any]:
    """Returns the options of each part. What the whole table has to count is counted by its readers: a sample needs
    ``min_size`` rows of all shards together, of which one may have none."""
    if settings.is_queue:
        return {"sampler": settings.sampler, "policy": settings.policy}
    return {
        "sampler": settings.sampler,
        "remover": settings.remover,
        "limiter": settings.limiter.make_part(num_shards),
        "max_times_sampled": settings.max_times_sampled,
        "policy": settings.policy,
        "consumers": settings.consumers,
    }
