"""Looks from time to time whether the server's root is still there: without it nothing can be created or opened.

If another root stands in its place, the server ends at once: it would continue to create files by path in the other
root, which may be that of a server that runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tdserve.store.roots.root import Root

LOOK_S = 2.0
"""Time between two looks; one costs two system calls."""

_log = logging.getLogger("tdserve.server")


async def watch_root(
    root: Root, set_serving: Callable[[bool], Awaitable[None]], end: Callable[[], object], *, look_s: float = LOOK_S
) -> None:
    """Sets the server's health by whether its root is at its path, until it is cancelled.

    Args:
        root: The acquired root.
        set_serving: Sets the answer of the health service.
        end: Called once another root has taken its place; ends the process without another write.
        look_s: Time between two looks.
    """
    was_there = True
    while True:
        await asyncio.sleep(look_s)
        is_there = await asyncio.to_thread(root.is_in_place)
        if not is_there and await asyncio.to_thread(root.is_replaced):
            _log.error("another root has taken the place of %s, which this server held: it ends", root.path)
            end()
        if is_there == was_there:
            continue
        was_there = is_there
        if is_there:
            _log.warning("the root %s is back", root.path)
        else:
            _log.error("the root %s was deleted or moved away: the server cannot serve without it", root.path)
        await set_serving(is_there)
