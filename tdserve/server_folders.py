"""Servers that a launcher starts: each has the number of its folder below a path that all are given."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.launcher import Server

RETRY_INTERVAL_S = 0.5
"""Pause between two attempts to start a server on the folder of a predecessor that is about to leave it."""

_FOLDER = re.compile(r"server-(0|[1-9][0-9]*)")


def name_folder(storage: str, number: int) -> str:
    """Returns the folder of a server."""
    return os.path.join(storage, f"server-{number}")


def list_numbers(storage: str) -> list[int]:
    """Returns the numbers of the servers whose folders are here, sorted."""
    try:
        names = os.listdir(storage)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for found in map(_FOLDER.fullmatch, names) if found)


def assign_numbers(seen: Sequence[Collection[int]]) -> list[int]:
    """Returns the number of the server of each place: that of a folder which is there.

    On the disks of several machines a folder is where its server ran before; on a path that all share, everywhere.

    Args:
        seen: Numbers of the folders at each place. All empty: the servers are new.

    Raises:
        InvalidRequestError: A folder is missing, or there are some of more servers. With a new, empty folder a server
            would lack its stores, of which the others know.
    """
    places = range(len(seen))
    if not any(seen):
        return list(places)
    left = set(places)
    numbers: list[int] = []
    for place in places:
        here = left & set(seen[place])
        if not here:
            break
        numbers.append(place if place in here else min(here))
        left.remove(numbers[-1])
    if left or {number for each in seen for number in each} - set(places):
        found = "; ".join(f"{place}: {sorted(each)}" for place, each in enumerate(seen))
        reason = f"folders of {len(seen)} servers are not one per place ({found}); share a path, or use empty folders"
        raise InvalidRequestError(argument="storage", reason=reason)
    return numbers


def start_with_token(folder: str, host: str, token: str, settings: Mapping[str, Any]) -> Server:
    """Starts a server whose clients must send a token; it reads that from a file, which is gone afterwards.

    Raises:
        TDServeError: As in ``Server`` and its ``start``.
    """
    with NamedTemporaryFile("w", prefix="tdserve-token-") as file:
        file.write(token)
        file.flush()
        return Server(folder, host=host, token_file=file.name, **settings).start()
