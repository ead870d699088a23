"""``tdserve ls``: lists the stores."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from tdserve.base.errors import CorruptDataError, StoreNotFoundError
from tdserve.cli.screen.render import (
    escape_unprintable,
    format_duration,
    format_nbytes,
    print_json,
    print_lines,
    print_table,
)
from tdserve.cli.shell.options import Inquiry, ask_server, report_lost
from tdserve.client.cluster.cluster_catalog import ClusterCatalog
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tdserve.client.session.catalog.description import StoreDescription

if TYPE_CHECKING:
    from click import Context, Parameter

KINDS = ("tensordict", "replay", "queue", "weights", "keyed")
"""Kinds of stores, as they are shown."""

KINDS_BY_WORD = {**{kind: kind for kind in KINDS}, "kv": "keyed", "dataset": "tensordict", "store": "tensordict"}
"""By what --kind takes: also the words by which Python makes and opens them."""

COLUMNS = ("name", "kind", "rows", "capacity", "size", "version", "age")


def _read_kinds(context: Context, parameter: Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    words = [word.strip() for text in given for word in text.split(",")]
    unknown = next((word for word in words if word not in KINDS_BY_WORD), None)
    if unknown is not None:
        click.STRING.fail(f"{unknown!r} is not one of {', '.join(map(repr, KINDS_BY_WORD))}", parameter, context)
    return tuple(KINDS_BY_WORD[word] for word in words)


def _complete_kinds(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    head, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{head}{comma}{word}") for word in KINDS_BY_WORD if word.startswith(last)]


@click.command()
@click.option("-l", "--long", "is_long", is_flag=True, help="Kind, rows, size, version and age of each.")
@click.option(
    "--kind",
    "kinds",
    callback=_read_kinds,
    shell_complete=_complete_kinds,
    metavar=f"[{'|'.join(KINDS_BY_WORD)}],...",
    multiple=True,
    help="Only stores of these kinds; may be repeated. Those that cannot be described are left out.",
)
@ask_server
def ls(inquiry: Inquiry, is_long: bool, kinds: tuple[str, ...]) -> int:
    """List the stores, one name per line; with --long, a table. Of several servers, also the servers of each store."""
    with inquiry.open_catalog() as client:
        is_cluster = isinstance(client, ClusterCatalog)
        servers = client.list_servers() if isinstance(client, ClusterCatalog) else dict.fromkeys(client.stores(), ())
        asked = servers if is_long or kinds else {}
        described = [found for name in asked if (found := _describe_store(client, name, servers[name]))]
    shown = [each for each in described if not kinds or each.facts["kind"] in kinds]
    names = [each.facts["name"] for each in shown] if kinds else list(servers)
    code = report_lost(client)
    if inquiry.as_json:
        print_json([each.facts for each in shown] if is_long else names)
    elif is_long:
        columns = (*COLUMNS[:1], "server", *COLUMNS[1:]) if is_cluster else COLUMNS
        print_table(columns, [each.cells for each in shown], right=("rows", "capacity", "version", "age"))
    else:
        print_lines(map(escape_unprintable, names))
    return code


class Shown(NamedTuple):
    """A store as JSON and as a row of the table."""

    facts: dict[str, Any]
    cells: list[str]


def _describe_store(client: CatalogClient | ClusterCatalog, name: str, servers: tuple[int, ...]) -> Shown | None:
    try:
        described = client.describe(name)
    except StoreNotFoundError:
        return None  # deleted since it was listed
    except CorruptDataError:  # such as one whose adopted folder has vanished: tdserve info shows more
        facts: dict[str, Any] = {"name": name, "kind": "damaged"}
        cells = [escape_unprintable(name), "damaged", *[""] * (len(COLUMNS) - 2)]
    else:
        facts, cells = _make_facts(described), _make_cells(described)
    if isinstance(client, ClusterCatalog):
        facts["servers"] = list(servers)
        cells.insert(1, ", ".join(map(str, servers)))
    return Shown(facts, cells)


def _make_facts(described: StoreDescription) -> dict[str, Any]:
    names = ("name", "kind", "num_rows", "capacity", "nbytes", "version", "created_s")
    return {**{name: getattr(described, name) for name in names}, "kind": show_kind(described)}


def show_kind(described: StoreDescription) -> str:
    """Returns the kind of a store as it was created: a queue is a table whose rows are taken."""
    return "queue" if described.is_queue else described.kind


def _make_cells(described: StoreDescription) -> list[str]:
    return [
        escape_unprintable(described.name),
        show_kind(described),
        str(described.num_rows),
        str(described.capacity or ""),
        format_nbytes(described.nbytes),
        "" if described.capacity else str(described.version),
        format_duration(time.time() - described.created_s),
    ]
