"""``tdserve keys NAME``: the keys of one store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tdserve.cli.leaf_table import COLUMNS, describe_leaves
from tdserve.cli.options import CONNECT_TIMEOUT_S, add_client_options, make_endpoint, open_catalog_client
from tdserve.cli.render import format_key, print_json, print_lines, print_table


@click.command()
@click.argument("name")
@click.option("--root-only", is_flag=True, help="Only keys of the root, no nested ones.")
@click.option("--leaves-only", is_flag=True, help="Only tensors.")
@click.option("--sort", is_flag=True, help="Sorted, instead of in insertion order.")
@click.option("-l", "--long", "is_long", is_flag=True, help="With type, shape and bytes; always with nested keys.")
@add_client_options
def keys(
    name: str,
    *,
    root_only: bool,
    leaves_only: bool,
    sort: bool,
    is_long: bool,
    address: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """List the keys of store NAME, one per line, nested ones as tuples; of a keyed store those of its entries."""
    listed: Sequence[Any] = ()
    with open_catalog_client(address, token_file) as client:
        described = client.describe(name)
        if is_long:
            leaves = describe_leaves(described.spec, leaves_only=leaves_only, sort=sort)
        elif described.kind != "keyed":
            listed = client.keys(name, include_nested=not root_only, leaves_only=leaves_only, sort=sort)
    if described.kind == "keyed" and not is_long:
        with make_endpoint(address, token_file).connect(timeout_s=CONNECT_TIMEOUT_S) as connected:
            listed = connected.kv(name).keys()
    if is_long and as_json:
        print_json([leaf.as_dict() for leaf in leaves])
    elif is_long:
        print_table(COLUMNS, [leaf.make_cells() for leaf in leaves], right=("bytes",))
    elif as_json:
        print_json(list(listed))
    else:
        print_lines(map(format_key, listed))
