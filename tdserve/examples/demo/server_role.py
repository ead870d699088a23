"""``tdserve demo --role server``: a server for actors and a learner that run elsewhere. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tdserve.base.addresses import parse_address
from tdserve.base.config import ServerConfig
from tdserve.server.main import run


def serve(address: str | None, root: Path | None) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns the exit code.

    Raises:
        InvalidRequestError, RootInUseError, CorruptDataError: The server did not start; nothing was changed.
    """
    return run(settings(address, root).validate())


def settings(address: str | None, root: Path | None, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Returns the server's settings, from ``TDSERVE_*`` variables and from the address that the other roles use.

    Args:
        address: ``host:port`` of the server for the other roles. A name or address that other machines can reach means
            every interface, because a container's health check comes over loopback. None means ``127.0.0.1:7707``.
        root: The folder that the server owns; None reads ``TDSERVE_ROOT``.
        environ: The variables; None reads those of the process.

    Raises:
        InvalidRequestError: A setting is not possible, or there is no root.
    """
    defaults = {}
    if address is not None:
        host, port = parse_address("address", address)
        is_here = ServerConfig(root="", host=host).is_loopback
        defaults = {"host": host if is_here else "0.0.0.0", "port": port}  # noqa: S104 (not without a token)
    return ServerConfig.from_env(environ, defaults=defaults, root=None if root is None else str(root))
