"""Servers that Ray places, restarts and finds; needs the package ``ray``, read at version 2.60.

``tdserve.ray.start(3, storage="/mnt/shared")`` starts them, and ``tdserve.connect("ray://tdserve")`` finds them from
any task or actor of the cluster. A reading order: ``ray_servers`` (start and end), ``server_actor`` (what Ray runs),
``ray_membership`` (how clients find them), ``actor_names``.
"""

from __future__ import annotations

from tdserve.ray.ray_servers import RayServers, shutdown, start

__all__ = ["RayServers", "shutdown", "start"]
