"""``tdserve keys NAME``: the keys of one store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from tdserve.cli.screen.leaf_table import is_on_terminal, print_leaves, print_tree
from tdserve.cli.screen.render import format_key, print_json, print_lines
from tdserve.cli.shell.options import Inquiry, ask_server, report_left_out, report_lost, take_store
from tdserve.client.session.catalog.structure_leaves import describe_leaves


@click.command()
@take_store
@click.option("--root-only", is_flag=True, help="Only keys of the root, no nested ones.")
@click.option("--leaves-only", is_flag=True, help="Only tensors.")
@click.option("--sort", is_flag=True, help="Sorted, instead of in insertion order.")
@click.option("-l", "--long", "is_long", is_flag=True, help="With type, shape and bytes; always with nested keys.")
@ask_server
def keys(
    inquiry: Inquiry,
    name: str,
    *,
    root_only: bool,
    leaves_only: bool,
    sort: bool,
    is_long: bool,
) -> int:
    """List the keys of store NAME, one per line, nested ones as tuples; of a keyed store those of its entries.

    On a terminal they are shown as a tree.
    """
    listed: Sequence[Any] = ()
    code = 0
    with inquiry.open_catalog() as client:
        described = client.describe(name)
        is_tree = not (inquiry.as_json or root_only or leaves_only) and is_on_terminal()
        if is_long or is_tree:
            leaves = describe_leaves(described.spec, leaves_only=leaves_only, sort=sort)
        elif described.kind != "keyed":
            listed = client.keys(name, include_nested=not root_only, leaves_only=leaves_only, sort=sort)
        if described.kind != "keyed" or is_long:
            code = report_lost(client)
    if described.kind == "keyed" and not is_long:
        with inquiry.connect() as connected:
            listed = connected.kv(name).keys()
            code = report_left_out(connected, name)
    if is_long and inquiry.as_json:
        print_json([leaf.as_dict() for leaf in leaves])
    elif is_tree and (is_long or described.kind != "keyed"):
        print_tree(name, leaves, has_types=is_long)
    elif is_long:
        print_leaves(leaves)
    elif inquiry.as_json:
        print_json(list(listed))
    else:
        print_lines(map(format_key, listed))
    return code
