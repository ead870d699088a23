"""Finishes moves whose movers were lost when the target had all of the store: the target keeps that for ever, since it
cannot know whether the source has released the store.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tdserve.base.errors import StoreMovedError, TDServeError
from tdserve.client.cluster.servers.members import Members
from tdserve.client.cluster.servers.placement_records import find_here
from tdserve.client.moves.move_steps import request_step


class _Knowledge(NamedTuple):
    """What a server knows of a store.

    Attributes:
        move: The move by which it has released the store; "" if it has not.
        is_sealed: Whether a move may be about to have it released.
    """

    move: str = ""
    is_sealed: bool = False


def finish_cut_short(members: Members, name: str, targets: Iterable[int]) -> None:
    """Has servers show what was released to them, and remove what will not be released any more.

    What a mover still works on stays: its store is sealed. So does everything while another server does not answer.
    Nothing is raised: moves of other stores do not depend on it.

    Args:
        name: The store that is to be moved, for which the token is asked.
        targets: Numbers of the servers that are asked what has come to them.
    """
    for target in targets:
        with suppress(TDServeError):
            for arrived in request_step(members.get(target), name, list_complete=True).complete:
                _finish(members, target, arrived.store, arrived.move)


def _finish(members: Members, target: int, name: str, move: str) -> None:
    others = [server for server in range(len(members)) if server != target]
    known, lost = members.ask_all({server: partial(_ask, members, server, name) for server in others})
    is_released = any(each.move == move for each in known.values())
    if is_released:
        request_step(members.get(target), name, move=move, show=True)
    elif not lost and not any(each.is_sealed for each in known.values()):
        request_step(members.get(target), name, move=move, give_up=True)


def _ask(members: Members, server: int, name: str) -> _Knowledge:
    try:
        found = find_here(members.get(server), name, timeout_s=0)
    except StoreMovedError:
        return _Knowledge(is_sealed=True)
    return _Knowledge(found.move) if isinstance(found, StoreMovedError) else _Knowledge()
