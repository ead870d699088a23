"""The actor that runs one server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

import ray

from tdserve.base.errors import TDServeError, WrongStateError
from tdserve.launcher import Server
from tdserve.server_folders import RETRY_INTERVAL_S, start_with_token

_log = logging.getLogger("tdserve.ray")


class ServerActor:
    """Runs a server at the address of its node, and ends with it, so that Ray starts both again.

    Ray makes a new object when it restarts the actor, on this node or another one. That continues with the folder of
    its predecessor, and waits until it is there and free: an empty one would lack the stores that clients know of.

    Args:
        folder: Folder of the server.
        token: Which clients must send; they get it with the address.
        settings: As in ``tdserve.Server``.
    """

    def __init__(self, folder: str, token: str, settings: Mapping[str, Any]) -> None:
        self._folder, self._token, self._settings = folder, token, settings
        self._server: Server | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._start_again()

    def start(self) -> None:
        """Starts the server, at first when it is asked to: an error of a constructor would not arrive as it is.

        Raises:
            TDServeError: As in ``Server.start``.
        """
        self._server = start_with_token(self._folder, ray.util.get_node_ip_address(), self._token, self._settings)
        Thread(target=self._end_with, args=(self._server,), daemon=True, name="tdserve-watch").start()

    def get_address(self) -> tuple[str, str]:
        """Returns the server's address, and the token.

        Raises:
            WrongStateError: It has not been started yet.
        """
        if self._server is None:
            raise WrongStateError(state="not started", event="get_address")
        return self._server.address, self._token

    def end(self, timeout_s: float) -> Any:
        """Drains and ends the server; returns the placement group, which only its members can find."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown(timeout_s)
        return ray.util.get_current_placement_group()

    def _start_again(self) -> None:
        why = ""
        while True:
            reason = f"{self._folder} is not on this node; if it is on the disk of a lost one, so are its rows"
            try:
                if os.path.isdir(self._folder):
                    return self.start()
            except TDServeError as error:  # whatever it is may pass: Ray would give the actor up for good
                reason = str(error)
            if reason != why:
                why = reason
                _log.warning("the server does not start again yet: %s", why)
            time.sleep(RETRY_INTERVAL_S)

    def _end_with(self, server: Server) -> None:
        with suppress(ChildProcessError):  # its end was noticed elsewhere
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        if self._server is server:
            os._exit(1)
