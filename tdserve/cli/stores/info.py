"""``tdserve info [NAME]``: everything known about one store, or about the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from tdserve.cli.screen.hidden_figures import mark_hidden
from tdserve.cli.screen.leaf_table import is_on_terminal, print_leaves, print_tree
from tdserve.cli.screen.render import (
    escape_unprintable,
    format_duration,
    format_nbytes,
    print_json,
    print_table,
    to_jsonable,
)
from tdserve.cli.shell.completion import complete_stores
from tdserve.cli.shell.options import Inquiry, ask_server, report_lost
from tdserve.cli.stores.ls import show_kind
from tdserve.client.cluster.cluster_catalog import ClusterCatalog
from tdserve.client.session.catalog.structure_leaves import describe_leaves

DURATIONS = ("uptime_s", "checkpoint_age_s")

HIDDEN = ("spec", "name")
"""Facts that the header or the table of leaves already shows."""


@click.command()
@click.argument("name", required=False, shell_complete=complete_stores)
@ask_server
def info(inquiry: Inquiry, name: str | None) -> int:
    """Show what is known about store NAME, on a terminal with its structure as a tree; without NAME, about the server.

    Facts that are empty or false are shown with --json only.
    """
    with inquiry.open_catalog() as client:
        if name is None:
            stats = mark_hidden(client.stats())
            inquiry.answer(stats, lambda: show_stats(stats))
            return report_lost(client)
        where: dict[str, Any] = {}
        if isinstance(client, ClusterCatalog):
            located = client.locate(name)
            described = located.description
            where = {"servers": list(located.servers), "degraded": list(located.degraded)}
        else:
            described = client.describe(name)
    facts = {**described.as_dict(), **where, "kind": show_kind(described)}
    if inquiry.as_json:
        print_json(facts)
        return report_lost(client)
    shown = {name: value for name, value in facts.items() if name not in HIDDEN and not _is_nothing(value)}
    print_table((escape_unprintable(described.name), ""), make_fact_rows(shown))
    click.echo()
    leaves = describe_leaves(described.spec)
    print_tree("keys", leaves) if is_on_terminal() else print_leaves(leaves)
    return report_lost(client)


def show_stats(stats: Mapping[str, Any]) -> None:
    """Prints the figures of a server; of several, a table for each."""
    if "servers" not in stats:
        print_table(("fact", "value"), _make_server_rows(stats))
        return
    for number, (server, facts) in enumerate(sorted(stats["servers"].items())):
        if number:
            click.echo()
        print_table((f"server {server}", "value"), _make_server_rows(facts))
    for server in stats["lost"]:
        click.echo(f"\nserver {server}\ndoes not answer")


def _is_nothing(value: Any) -> bool:
    """Returns whether a store does not have this: most facts are about one kind of store."""
    return value is None or value is False or (isinstance(value, (str, list, tuple, dict)) and not value)


def _make_server_rows(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns one row per figure; without a checkpoint there is none of it, and no age."""
    left_out = () if stats.get("checkpoint") else ("checkpoint", "checkpoint_age_s")
    return make_fact_rows({name: value for name, value in stats.items() if name not in left_out})


def make_fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns one row per fact, with readable sizes and times; a list or mapping that has mappings gives one row per
    entry."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        entries = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(entries, Mapping) and any(isinstance(item, Mapping) for item in entries.values()):
            rows += [(escape_unprintable(f"{name}[{key}]"), _format_fact(str(key), it)) for key, it in entries.items()]
        else:
            rows.append((escape_unprintable(name), _format_fact(name, value)))
    return rows


def _format_mapping(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape_unprintable(str(key))} {_format_fact(str(key), item)}" for key, item in value.items())


def _format_fact(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return _format_mapping(value)
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes" in name.split("_") or name == "nbytes"):
        return format_nbytes(value)
    if name == "created_s" and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if name in DURATIONS:
        return format_duration(value)
    return escape_unprintable(str(to_jsonable(value)))
