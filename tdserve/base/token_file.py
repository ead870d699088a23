"""The file of tokens, as bytes and as a document; what is in it is for ``tdserve.rules.access.token_entries``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple

from tdserve.base.errors import InvalidRequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 8 << 20
"""Ten thousand entries take about three megabytes."""


class FileState(NamedTuple):
    """What changes when a file is written or replaced.

    Attributes:
        inode, nbytes, modified_ns, changed_ns: As in ``os.stat``.
    """

    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int


def read_state(path: str) -> FileState | None:
    """Returns the state of a file; None if it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_content(path: str) -> bytes:
    """Returns the content of a file.

    Raises:
        InvalidRequestError: It cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise _make_error(f"cannot read {path}: {fault.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _make_error(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content


def parse_document(content: bytes, path: str) -> Any:
    """Returns the document of a file, which is JSON if it begins with ``{``, and otherwise TOML.

    Raises:
        InvalidRequestError: It is neither. The reason shows nothing of its content.
    """
    form = "JSON" if content.lstrip().startswith(b"{") else "TOML"
    try:
        text = content.decode()
        return json.loads(text) if form == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as fault:
        where = f" in line {fault.lineno}" if isinstance(fault, json.JSONDecodeError) else ""
        raise _make_error(f"{path} is not {form}{where}") from None


def _make_error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(argument="tokens_file", reason=reason)
