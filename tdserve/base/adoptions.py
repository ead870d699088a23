"""The settings that name folders to be served in place. No I/O."""

from __future__ import annotations

import os

from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import check_store_name


def parse_folders(text: str) -> tuple[str, ...]:
    """Parses folders separated by colons, as in ``PATH``; relative ones are made absolute."""
    return tuple(os.path.abspath(folder) for folder in text.split(os.pathsep) if folder)


def parse_adoptions(text: str) -> tuple[str, ...]:
    """Parses folders and names of stores, ``PATH=NAME``, separated by commas; relative paths are made absolute."""
    return tuple(os.path.abspath(adoption) for adoption in text.split(",") if adoption)


def split_adoption(text: str) -> tuple[str, str, bool]:
    """Returns path, name and whether it is read-only, of ``PATH=NAME`` or ``PATH=NAME:ro``.

    Raises:
        InvalidRequestError: It is neither.
    """
    path, _, name = text.removesuffix(":ro").rpartition("=")
    if not os.path.isabs(path) or "," in path:
        reason = f"{text!r} is not of the form PATH=NAME or PATH=NAME:ro with an absolute path without commas"
        raise InvalidRequestError(argument="adopt", reason=reason)
    return path, check_store_name(name), text.endswith(":ro")
