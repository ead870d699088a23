"""``tdserve.toml``: the options of a server in a file, whose keys are the fields of ``ServerConfig``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.server_options import SERVER_OPTIONS, ServerOption

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "server"
"""The table of the file that has the options; other tables are refused."""

MAX_FILE_BYTES = 1 << 20

_OPTIONS = {option.name: option for option in SERVER_OPTIONS}


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the options of a file, as values of the fields of ``ServerConfig``.

    Relative paths in it are relative to its folder.

    Raises:
        InvalidRequestError: The file cannot be read, or has an invalid key or value. The error names it, and the
            key that was meant.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequestError(argument="config", reason=f"{path} has more than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(text.decode())
    except OSError as fault:
        raise InvalidRequestError(argument="config", reason=f"cannot read {path}: {fault.strerror}") from None
    except ValueError as fault:  # not UTF-8, or not TOML
        raise InvalidRequestError(argument="config", reason=f"{path} is not TOML: {fault}") from None
    _check_names(path, document, (TABLE,), "table")
    table = document.get(TABLE, {})
    if not isinstance(table, Mapping):
        raise InvalidRequestError(argument="config", reason=f"{path}: '{TABLE}' must be a table, [{TABLE}]")
    _check_names(path, table, tuple(_OPTIONS), "option")
    folder = os.path.dirname(os.path.abspath(path))
    return {name: _convert(path, _OPTIONS[name], value, folder) for name, value in table.items()}


def _check_names(path: object, found: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in found:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(known)}"
            raise InvalidRequestError(argument="config", reason=f"{path} has an unknown {what} {name!r}; {remedy}")


def _convert(path: object, option: ServerOption, value: Any, folder: str) -> Any:
    """Returns the value of a field for that of a file."""
    if option.parse_several is not None and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return option.parse_several([os.path.join(folder, each) for each in value] if option.is_path else value)
    if isinstance(value, str):
        try:
            if option.parse_several is not None:
                return _convert(path, option, [value], folder)
            is_relative = option.is_path and "://" not in value  # a place may be a URL
            return option.parse(os.path.normpath(os.path.join(folder, value)) if is_relative else value)
        except (ValueError, KeyError):
            pass
    # a bool is an int of Python
    elif isinstance(value, option.types) and (not isinstance(value, bool) or bool in option.types):
        return value
    raise InvalidRequestError(argument="config", reason=f"{path}: {value!r} is no value of {option.name}")
