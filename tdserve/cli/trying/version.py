"""``tdserve version``: the versions of tdserve and of what it stands on."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from tdserve.base.config import PROTOCOL_VERSION
from tdserve.cli.screen.render import print_json, print_table

PACKAGES = ("tdserve", "torch", "tensordict", "numpy", "grpcio", "protobuf", "lmdb")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def version(as_json: bool) -> None:
    """Show the versions of tdserve, of its protocol, of Python and of the packages below it; asks no server."""
    facts = {name: _find_version(name) for name in PACKAGES}
    facts |= {"protocol": str(PROTOCOL_VERSION), "python": platform.python_version(), "platform": platform.platform()}
    print_json(facts) if as_json else print_table(("what", "version"), list(facts.items()))


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # as where the sources are run from their folder
        return "not installed"
