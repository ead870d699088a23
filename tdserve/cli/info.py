"""``tdserve info [NAME]``: everything known about one store, or about the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tdserve.cli.leaves import COLUMNS, describe_leaves
from tdserve.cli.options import catalog_client, client_options
from tdserve.cli.render import jsonable, nbytes_text, print_json, print_table, printable
from tdserve.client.session.message_facts import message_facts

HIDDEN = ("spec", "name")
"""Facts that the header or the table of leaves already shows."""


@click.command()
@click.argument("name", required=False)
@client_options
def info(name: str | None, address: str | None, token_file: Path | None, as_json: bool) -> None:
    """Show everything known about store NAME; without NAME, about the server."""
    with catalog_client(address, token_file) as client:
        described = None if name is None else client.describe(name)
        facts = message_facts(client.get_server_stats()) if described is None else described.as_dict()
    if described is None:
        print_json(facts) if as_json else print_table(("fact", "value"), fact_rows(facts))
        return
    leaves = describe_leaves(described.spec)
    batch_size = list(described.spec.batch_size)
    if as_json:
        print_json({**facts, "spec": {"batch_size": batch_size, "keys": [leaf.as_dict() for leaf in leaves]}})
        return
    shown = {key: value for key, value in facts.items() if key not in HIDDEN}
    print_table((printable(described.name), ""), fact_rows({**shown, "batch_size": batch_size}))
    click.echo()
    print_table(COLUMNS, [leaf.cells() for leaf in leaves], right=("bytes",))


def fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns one row per fact, with readable sizes and times; a list of mappings gives one row per entry."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
            rows += [(printable(f"{name}[{i}]"), _mapping_text(item)) for i, item in enumerate(value)]
        elif isinstance(value, Mapping):
            rows.append((printable(name), _mapping_text(value)))
        else:
            rows.append((printable(name), _fact_text(name, value)))
    return rows


def _mapping_text(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{printable(str(key))} {_fact_text(str(key), item)}" for key, item in value.items())


def _fact_text(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes" in name.split("_") or name == "nbytes"):
        return nbytes_text(value)
    if name == "created_s" and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return printable(str(jsonable(value)))
