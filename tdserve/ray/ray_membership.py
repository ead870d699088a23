"""The servers of a cluster as Ray's named actors know them."""

from __future__ import annotations

import os

import ray

from tdserve.base.errors import ConnectError
from tdserve.client.cluster.servers.membership import Membership
from tdserve.ray.actor_names import NAMESPACE, check_name, make_actor_name, parse_actor_name

LOOK_UP_TIMEOUT_S = 2.0
"""An actor that runs answers within milliseconds, one that Ray restarts not at all."""


class RayMembership(Membership):
    """Servers that ``tdserve.ray.start`` runs: ``ray://NAME``. In a process that has not joined Ray, it joins the
    cluster that runs on this machine, or that ``RAY_ADDRESS`` names.

    Args:
        text: The address.

    Raises:
        ConnectError: There is no cluster, or there are no servers of this name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._name = check_name(text.partition("://")[2])
        self._pid = os.getpid()
        self._found: dict[int, str] = {}
        join_cluster(text)
        self.num_servers = count_servers(self._name)
        if not self.num_servers:
            raise ConnectError(address=text, reason="Ray has no servers of this name; tdserve.ray.start starts them")

    def find(self, server: int) -> str:
        """See :class:`~tdserve.client.cluster.servers.membership.Membership`. A forked process cannot ask Ray: it takes
        what was found before the fork."""
        if os.getpid() == self._pid:
            self._found[server], self.token = self._look_up(server)
        elif server not in self._found:
            reason = f"server {server} was not used before this process was forked; spawn processes that use Ray"
            raise ConnectError(address=self.text, reason=reason)
        return self._found[server]

    def _look_up(self, server: int) -> tuple[str, str | None]:
        try:
            actor = ray.get_actor(make_actor_name(self._name, server, self.num_servers), namespace=NAMESPACE)
            try:
                address, token = ray.get(actor.get_address.remote(), timeout=LOOK_UP_TIMEOUT_S)
            except ray.exceptions.ActorUnavailableError:  # also where it was before: Ray now learns where it is
                address, token = ray.get(actor.get_address.remote(), timeout=LOOK_UP_TIMEOUT_S)
        except (ValueError, ray.exceptions.RayError) as error:
            why = str(error).strip().partition("\n")[0]
            reason = f"server {server} has no address now: {type(error).__name__}: {why}"
            raise ConnectError(address=self.text, reason=reason) from error
        return address, token


def count_servers(name: str) -> int:
    """Returns how many servers of a name there are, dead or alive; 0 if Ray has none."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = [parse_actor_name(actor["name"]) for actor in actors if actor["namespace"] == NAMESPACE]
    return next((num_servers for each, _, num_servers in filter(None, found) if each == name), 0)


def join_cluster(address: str) -> None:
    """Makes this process one of the Ray cluster that it can find, unless it is one of any.

    Raises:
        ConnectError: There is none.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise ConnectError(address=address, reason=f"there is no Ray cluster here: {error}") from error
