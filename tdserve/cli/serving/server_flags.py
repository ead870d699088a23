"""The options of a server as options of a command, made from the table ``SERVER_OPTIONS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tdserve.base.config import find_config_path
from tdserve.base.config_file import read_config_file
from tdserve.base.server_options import SERVER_OPTIONS, ServerOption

Command = Callable[..., Any]


def add_server_options(command: Command) -> Command:
    """Adds ROOT, every option of a server and ``--config`` to a command, which gets None for what is not given."""
    for option in reversed(SERVER_OPTIONS):
        command = _make_decorator(option)(command)
    return click.option(
        "--config",
        "config_path",
        metavar="FILE",
        help="A tdserve.toml with options for what is neither given nor a variable; else $TDSERVE_CONFIG.",
    )(command)


def read_defaults(config_path: str | None) -> dict[str, Any]:
    """Returns the options of the file that was given, or that ``TDSERVE_CONFIG`` names; none without a file.

    Raises:
        InvalidRequestError: The file cannot be read, or has a wrong option.
    """
    path = config_path or find_config_path()
    return {} if path is None else read_config_file(path)


def _make_decorator(option: ServerOption) -> Callable[[Command], Command]:
    if not option.flag:
        return click.argument(option.name, required=False)
    if not option.metavar:
        return click.option(option.flag, option.name, is_flag=True, default=None, help=option.help)
    return click.option(
        option.flag,
        option.name,
        metavar=option.metavar,
        help=option.help,
        multiple=option.parse_several is not None,
        callback=lambda _, __, given: _parse(option, given),
    )


def _parse(option: ServerOption, given: Any) -> Any:
    """Returns the value of what was given to a flag; None if that is nothing.

    Raises:
        BadParameter: It is not of the option's type.
    """
    if option.parse_several is not None:
        return option.parse_several(given) or None
    if given is None:
        return None
    try:
        return option.parse(given)
    except (ValueError, KeyError) as fault:
        raise click.BadParameter(f"{given!r} is no {option.metavar}") from fault
