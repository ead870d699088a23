"""``tdserve config show``: the options of a server, and where each comes from."""

from __future__ import annotations

import os
from typing import Any

import click

from tdserve.base.addresses import check_listenable, find_interface_address
from tdserve.base.adoptions import split_adoption
from tdserve.base.config import ServerConfig, Setting, find_config_path
from tdserve.base.errors import InvalidRequestError
from tdserve.base.server_options import SERVER_OPTIONS, ServerOption
from tdserve.cli.screen.render import escape_unprintable, print_json, print_table
from tdserve.cli.serving.server_flags import add_server_options, read_defaults

COLUMNS = ("option", "value", "from")


@click.group()
def config() -> None:
    """Options of a server: flags, variables and a file."""


@config.command()
@add_server_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def show(config_path: str | None, as_json: bool, **settings: Any) -> None:
    """Show the options with which `tdserve serve` would start, given the same arguments, and where each comes from.

    A flag goes before a variable, a variable before the file of --config or $TDSERVE_CONFIG, and that before the
    default. Without a root it shows the rest. Exit code 1 if a server could not start with them on this machine;
    whether its ports are free, and what the root holds, is not looked at.
    """
    found = ServerConfig.find_settings(defaults=read_defaults(config_path), **settings)
    path = config_path or find_config_path() or ""
    origins = {option.name: _find_origin(option, found[option.name], path) for option in SERVER_OPTIONS}
    if as_json:
        facts = {name: {"value": setting.value, "from": origins[name]} for name, setting in found.items()}
        print_json(facts)
    else:
        rows = [(name, _format(name, setting.value), origins[name]) for name, setting in found.items()]
        print_table(COLUMNS, rows)
    if found["root"].value is None:
        found["root"] = found["root"]._replace(value=os.curdir)  # what is missing is no fault of the others
    _check_on_machine(ServerConfig.of_settings(found).validate())


def _check_on_machine(settings: ServerConfig) -> None:
    """Raises InvalidRequestError if a file, folder or address that the settings name is not here, as `serve` does."""
    from tdserve.server.access.token_register import TokenRegister  # only this command needs a part of the server

    TokenRegister.open(settings)
    if settings.interface is not None:
        find_interface_address(settings.interface)
    check_listenable(settings.host, 0)  # a server that runs with these settings has the port
    for path, _, _ in map(split_adoption, settings.adopt):
        if not os.path.isdir(path):
            raise InvalidRequestError(argument="adopt", reason=f"there is no folder {path}")


def _find_origin(option: ServerOption, setting: Setting, path: str) -> str:
    """Returns where a value comes from: a flag, a variable, a file, or ``default``."""
    origins = {"given": option.flag or option.metavar, "variable": option.variable, "defaults": path}
    return escape_unprintable(origins.get(setting.source, setting.source))


def _format(name: str, value: Any) -> str:
    if value is None or value == ():
        return "-"
    if name == "umask":
        return f"{value:03o}"
    return escape_unprintable(", ".join(value) if isinstance(value, tuple) else str(value))
