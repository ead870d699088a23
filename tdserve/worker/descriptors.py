"""Watches a data worker's descriptors, which strangers may use up with idle connections.

gloo keeps every connection to its port, even after the other end has gone, and ends the process when it cannot accept
another one (measured). So if strangers hold many, their port accepts no more connections, and later channels are formed
on another port.
"""

from __future__ import annotations

import logging
import os
from threading import Event, Thread

from tdserve.base.errors import ServerBusyError
from tdserve.base.machine import EXIT_NO_DESCRIPTORS, count_descriptors, get_descriptor_limit
from tdserve.transport.proven import leave_all_devices
from tdserve.transport.strangers import Sockets, refuse_connections

LOOK_INTERVAL_S = 0.5

CROWDED_SHARE = 0.5
"""Share of used descriptors at which strangers are looked for first; then, each time half of the rest is used up."""

MIN_STRANGERS = 8
"""Fewer connections than this may belong to clients that are connecting."""

FULL_SHARE = 0.95
"""Share from which on the process ends itself, before gloo does: then the log has the reason."""

MIN_FREE = 8
"""Descriptors that stay free for files when a connection is formed."""

_log = logging.getLogger("tdserve.worker")


def check_room(asked: int) -> None:
    """Checks that a channel can be formed without endangering the process.

    Raises:
        ServerBusyError: There are too few descriptors.
    """
    limit = get_descriptor_limit()
    free = limit - MIN_FREE - count_descriptors()
    if free < asked:
        what = "another connection, in descriptors of the data worker"
        raise ServerBusyError(what=what, asked=asked, free=max(free, 0), limit=limit)


class DescriptorWatch:
    """Checks repeatedly, in a thread of its own, until ``close``."""

    def __init__(self) -> None:
        self._ending = Event()
        self._crowded_share = CROWDED_SHARE
        self._thread = Thread(target=self._run, name="tdserve-descriptors", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()
        self._thread.join()

    def look(self) -> int:
        """Closes the ports of this process if strangers use up its descriptors.

        Returns:
            How many connections of strangers there are; 0 if nothing was done.
        """
        share = count_descriptors() / get_descriptor_limit()
        if share < CROWDED_SHARE:
            self._crowded_share = CROWDED_SHARE
        if share < self._crowded_share:
            return 0
        self._crowded_share = (1 + share) / 2
        sockets = Sockets.from_this_process()
        if sockets.num_strangers < MIN_STRANGERS:
            return 0
        leave_all_devices()
        for listening in sockets.listening:
            refuse_connections(listening)
        _log.warning(
            "%d connections to gloo's port said nothing that belongs there, and hold descriptors: from %s. The port "
            "takes no more, another one is used. The ports of gloo belong in a trusted network",
            sockets.num_strangers,
            sockets.describe_strangers(),
        )
        return sockets.num_strangers

    def _run(self) -> None:
        while not self._ending.wait(LOOK_INTERVAL_S):
            try:
                self.look()
            except OSError as fault:  # even this needs a descriptor
                _log.warning("descriptors cannot be looked at: %s", fault)
            if count_descriptors() >= FULL_SHARE * get_descriptor_limit():
                _log.error("%d of %d descriptors are in use: leaving", count_descriptors(), get_descriptor_limit())
                os._exit(EXIT_NO_DESCRIPTORS)
