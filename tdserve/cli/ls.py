"""``tdserve ls``: lists the stores."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tdserve.base.errors import CorruptDataError, StoreNotFoundError
from tdserve.cli.options import Inquiry, asks_server
from tdserve.cli.render import escape_unprintable, format_nbytes, print_json, print_lines, print_table
from tdserve.client.session.description import StoreDescription

if TYPE_CHECKING:
    from tdserve.client.cluster.cluster_client import ClusterClient
    from tdserve.client.session.catalog_client import CatalogClient

COLUMNS = ("name", "kind", "rows", "capacity", "size", "version", "age")


@click.command()
@click.option("-l", "--long", "is_long", is_flag=True, help="Kind, rows, size, version and age of each.")
@asks_server
def ls(inquiry: Inquiry, is_long: bool) -> None:
    """List the stores, one name per line; with --long, a table."""
    with inquiry.open_catalog() as client:
        names = client.stores()
        found = [shown for name in names if (shown := _describe(client, name))] if is_long else []
    if inquiry.as_json:
        print_json([each.facts for each in found] if is_long else names)
    elif is_long:
        print_table(COLUMNS, [each.cells for each in found], right=("rows", "capacity", "version", "age"))
    else:
        print_lines(map(escape_unprintable, names))


class Shown(NamedTuple):
    """A store as JSON and as a row of the table."""

    facts: dict[str, Any]
    cells: list[str]


def _describe(client: CatalogClient | ClusterClient, name: str) -> Shown | None:
    try:
        described = client.describe(name)
    except StoreNotFoundError:
        return None  # deleted since it was listed
    except CorruptDataError:  # such as one whose adopted folder has vanished: tdserve info says more
        return Shown(
            {"name": name, "kind": "damaged"}, [escape_unprintable(name), "damaged", *[""] * (len(COLUMNS) - 2)]
        )
    return Shown(_make_facts(described), _make_cells(described))


def _make_facts(described: StoreDescription) -> dict[str, Any]:
    names = ("name", "kind", "num_rows", "capacity", "nbytes", "version", "created_s")
    return {name: getattr(described, name) for name in names}


def _make_cells(described: StoreDescription) -> list[str]:
    return [
        escape_unprintable(described.name),
        described.kind,
        str(described.num_rows),
        str(described.capacity or ""),
        format_nbytes(described.nbytes),
        "" if described.capacity else str(described.version),
        f"{max(0.0, time.time() - described.created_s):.0f} s",
    ]
