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
    """The server's settings: what ``TDSERVE_*`` variables say, and what the others call it by.

    Args:
        address: ``host:port`` that the other roles are told. A name or address of this machine that others can reach
            means every interface, since a container's health check comes over loopback. None: ``127.0.0.1:7707``.
        root: The folder that it owns; None reads ``TDSERVE_ROOT``.
        environ: The variables; None reads the process's own.

    Raises:
        InvalidRequestError: Something cannot be, or nothing says the root.
    """
    defaults = {}
    if address is not None:
        host, port = parse_address("address", address)
        is_here = ServerConfig(root="", host=host).is_loopback
        defaults = {"host": host if is_here else "0.0.0.0", "port": port}  # noqa: S104 (not without a token)
    return ServerConfig.from_env(environ, defaults=defaults, root=None if root is None else str(root))
