"""Start and end of servers in a Ray cluster."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import tdserve
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, TDServeError
from tdserve.base.integers import check_integer
from tdserve.launcher import SHUTDOWN_TIMEOUT_S, Server
from tdserve.ray.actor_names import NAMESPACE, check_name, make_actor_name
from tdserve.ray.ray_membership import count_servers
from tdserve.ray.server_actor import ServerActor
from tdserve.rules.placement import MAX_SERVERS
from tdserve.server_folders import assign_numbers, list_numbers, name_folder

if TYPE_CHECKING:
    from tdserve.client.cluster.cluster_client import ClusterClient

PLACE_TIMEOUT_S = 120.0
"""For room on enough nodes, the start of as many Python processes there, and of the servers."""

_PLACEMENTS = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""The options of an actor for the resources that have one."""

_kept: dict[str, list[Any]] = {}
"""Handles of the actors that this process started: Ray ends an actor without references."""


class RayServers:
    """Servers that Ray runs; a context manager, which ends them.

    Attributes:
        name: Theirs.
        address: To be passed to ``tdserve.connect`` in any task or actor: ``ray://NAME``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"ray://{name}"

    def __repr__(self) -> str:
        return f"<RayServers at {self.address}>"

    def client(self, **arguments: Any) -> ClusterClient:
        """Returns a new client of all of them; arguments as in ``tdserve.connect``."""
        return cast("ClusterClient", tdserve.connect(self.address, **arguments))

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Drains and ends them; see :func:`shutdown`."""
        shutdown(self.name, timeout_s=timeout_s)

    def __enter__(self) -> RayServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def start(
    num_servers: int = 1,
    *,
    storage: str | os.PathLike[str],
    name: str = "tdserve",
    resources: Mapping[str, float] | None = None,
    placement: Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"] = "SPREAD",
    lifetime: Literal["detached"] | None = None,
    token: str | None = None,
    timeout_s: float = PLACE_TIMEOUT_S,
    **settings: Any,
) -> RayServers:
    """Starts servers as actors in a placement group, and waits until they accept connections.

    Ray restarts an actor whose server, process or node was lost, and clients find its new address. They need no token:
    the actors hand it out to any process that can ask Ray.

    Args:
        num_servers: How many; fixed as long as their folders are used.
        storage: An absolute path, below which each server has a folder of its own, ``NAME/server-0`` and so on. On the
            nodes' own disks a server comes back on its node alone: rows are lost with the node. On a path that all
            nodes share it comes back with its rows wherever Ray restarts it.
        name: By which clients find them; any number of names may be in use.
        resources: Resources of each server, as Ray names them: ``{"CPU": 2, "memory": 8e9}``; one CPU by default.
        placement: As in Ray's placement groups.
        lifetime: None: they end with the job of this process. ``"detached"``: they run until :func:`shutdown`.
        token: Which clients must send; by default a random one.
        timeout_s: Until all of them serve.
        settings: Settings of each server, as in ``tdserve.Server``.

    Raises:
        InvalidRequestError: An argument is invalid, servers of this name run, or the folders that were found do not
            fit.
        DeadlineExceededError: Ray had no room for them, or they did not start in time.
        TDServeError: One could not start. In all cases none is left.
    """
    check_integer("num_servers", num_servers, 1, maximum=MAX_SERVERS)
    check_name(name)
    storage = os.fspath(storage)
    if not os.path.isabs(storage):
        raise InvalidRequestError(argument="storage", reason=f"{storage!r} is not an absolute path")
    if placement not in _PLACEMENTS:
        raise InvalidRequestError(argument="placement", reason=f"{placement!r} is not one of {', '.join(_PLACEMENTS)}")
    if lifetime not in (None, "detached"):
        raise InvalidRequestError(argument="lifetime", reason=f"{lifetime!r} is neither None nor 'detached'")
    wanted = dict(resources or {"CPU": 1})
    for key, amount in wanted.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not amount > 0:
            raise InvalidRequestError(argument="resources", reason=f"{key!r}: {amount!r} is no positive number")
    Server(storage, **settings)  # raises if one of them is invalid
    if count_servers(name):
        reason = f"servers of this name run: connect('ray://{name}'), or tdserve.ray.shutdown({name!r})"
        raise InvalidRequestError(argument="name", reason=reason)
    token = token or secrets.token_urlsafe(32)
    group = placement_group([wanted] * num_servers, placement, name=f"{NAMESPACE}/{name}", lifetime=lifetime)
    actors: list[Any] = []
    try:
        folders = os.path.join(storage, name)
        ray.get(group.ready(), timeout=timeout_s)
        numbers = assign_numbers(_look_around(group, folders, num_servers, timeout_s))
        for place, number in enumerate(numbers):
            options = _options_of(wanted, group, place)
            actor = ray.remote(ServerActor).options(
                name=make_actor_name(name, number, num_servers),
                namespace=NAMESPACE,
                lifetime=lifetime,
                max_restarts=-1,
                **options,
            )
            actors.append(actor.remote(name_folder(folders, number), token, settings))
        ray.get([actor.start.remote() for actor in actors], timeout=timeout_s)
    except BaseException as error:
        _remove(actors, group)
        if isinstance(error, ray.exceptions.GetTimeoutError):
            what = f"the start of {num_servers} servers with {wanted} each, {placement}"
            raise DeadlineExceededError(what=what, timeout_s=timeout_s) from error
        cause = getattr(error, "cause", None)
        if isinstance(cause, TDServeError):
            raise cause from error
        raise
    _kept[name] = actors
    return RayServers(name)


def shutdown(name: str = "tdserve", *, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
    """Drains and ends the servers of a name, also those that others started, and frees what they had reserved. Their
    folders stay. Does nothing if there are none.

    Args:
        name: As in :func:`start`.
        timeout_s: For requests under way; what has not ended then is killed.
    """
    num_servers = count_servers(name)
    actors = []
    for server in range(num_servers):
        with suppress(ValueError):  # it is gone already
            actors.append(ray.get_actor(make_actor_name(name, server, num_servers), namespace=NAMESPACE))
    group = None
    for ending in [actor.end.remote(timeout_s) for actor in actors]:
        with suppress(ray.exceptions.RayError):  # killed below, whatever it is
            group = ray.get(ending, timeout=timeout_s) or group
    _remove(actors, group)
    _kept.pop(name, None)


def _look_around(group: Any, folders: str, num_servers: int, timeout_s: float) -> list[list[int]]:
    """Returns the numbers of the servers whose folders are at each place of a placement group."""
    look = ray.remote(list_numbers)
    asked = [look.options(**_options_of({"CPU": 0}, group, place)).remote(folders) for place in range(num_servers)]
    return cast("list[list[int]]", ray.get(asked, timeout=timeout_s))


def _options_of(resources: Mapping[str, float], group: Any, place: int) -> dict[str, Any]:
    others = {key: amount for key, amount in resources.items() if key not in _OPTIONS}
    return {
        "num_cpus": 0,
        **{option: resources[key] for key, option in _OPTIONS.items() if key in resources},
        "resources": others,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
    }


def _remove(actors: list[Any], group: Any) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)
