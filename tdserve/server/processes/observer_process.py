"""The process that shows the server's figures by HTTP: ``python -m tdserve.observer``, an ordinary client of it.

The socket is the control process's: a scrape that comes while there is no observer waits in its queue for the next one.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec

from tdserve.base.addresses import advise_on_port, join_address, parse_address
from tdserve.base.config import ServerConfig
from tdserve.base.errors import InvalidRequestError
from tdserve.base.setting_checks import is_loopback
from tdserve.server.processes.client_process import ClientProcess

PACKAGES = ("prometheus_client", "starlette", "uvicorn")
"""What ``tdserve[observe]`` installs, and nothing else of tdserve needs."""

BACKLOG = 128
"""Connections that wait while the process starts."""


class ObserverProcess:
    """The observer, through all its restarts. Its socket is open from the beginning on.

    Args:
        config: Configuration of the server, with a port for metrics.

    Attributes:
        address: ``host:port`` at which it is reached.
        url: URL of the page: encrypted if the server has TLS and other machines reach the port.

    Raises:
        InvalidRequestError: Its packages are missing, or the port cannot be listened on. Nothing was started.
    """

    def __init__(self, config: ServerConfig) -> None:
        if missing := [package for package in PACKAGES if find_spec(package) is None]:
            reason = f"{missing[0]} is not installed: pip install 'tdserve[observe]'"
            raise InvalidRequestError(argument="metrics_port", reason=reason)
        self._config = config
        self._socket = _listen(config.metrics_host, config.metrics_port or 0)
        # What stays on this machine needs no encryption, and no certificate is for its loopback address.
        has_tls = config.tls_cert is not None and not is_loopback(config.metrics_host)
        self._tls = (config.tls_cert, config.tls_key, config.tls_client_ca) if has_tls else None
        self.address = join_address(config.metrics_host, self._socket.getsockname()[1])
        self.url = f"{'https' if has_tls else 'http'}://{self.address}"
        self._process = ClientProcess("observer", "tdserve.observer", fds=[self._socket.fileno()])

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid

    @property
    def num_restarts(self) -> int:
        """Times that it was started again."""
        return self._process.num_restarts

    def start(self, address: str, token: str | None) -> None:
        """Starts the process and keeps it alive until ``stop``.

        Args:
            address: Address of the server.
            token: Token of the observer itself; None if the server asks for none, and then a scrape needs none either.
        """
        setup = {
            "fd": self._socket.fileno(),
            "address": address,
            "token": token,
            "hosts": [self._config.metrics_host],
            "tls": self._tls,
            "log_level": self._config.log_level,
        }
        self._process.start(setup)

    async def stop(self) -> None:
        """Ends the process and closes the socket. Idempotent."""
        await self._process.stop()
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    plain, _ = parse_address("metrics_host", host)
    try:
        family, _, _, _, target = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(target)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as fault:
        advice = advise_on_port(fault, "--metrics-port")
        reason = f"{join_address(host, port)} cannot be listened on: {fault}{advice}"
        raise InvalidRequestError(argument="metrics_port", reason=reason) from fault
    return listening
