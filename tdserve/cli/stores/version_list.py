"""``tdserve versions NAME``: the kept versions of some weights."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from tdserve.base.errors import WrongStateError
from tdserve.cli.screen.render import escape_unprintable, format_cell, format_duration, format_nbytes, print_table
from tdserve.cli.shell.options import Inquiry, ask_server, take_store
from tdserve.client.session.catalog.description import VersionInfo

COLUMNS = ("version", "size", "published", "age", "metadata")


@click.command()
@take_store
@ask_server
def versions(inquiry: Inquiry, name: str) -> None:
    """List the versions of weights NAME that are kept, with size, time and metadata, the newest last."""
    with inquiry.open_catalog() as client:
        described = client.describe(name)
    if described.kind != "weights":
        state = f"store {name!r} is of kind {described.kind!r}; only weights have versions"
        raise WrongStateError(state=state, event="listing versions")
    inquiry.answer(
        [asdict(each) for each in described.versions],
        lambda: print_table(COLUMNS, map(make_version_cells, described.versions), right=COLUMNS[:2] + COLUMNS[3:4]),
    )


def make_version_cells(info: VersionInfo) -> tuple[str, ...]:
    """Returns the row of a table with ``COLUMNS``."""
    published = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created_s))
    age = format_duration(time.time() - info.created_s)
    metadata = ", ".join(f"{escape_unprintable(key)} {format_cell(value)}" for key, value in info.metadata.items())
    return str(info.version), format_nbytes(info.nbytes), published, age, metadata
