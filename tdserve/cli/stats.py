"""``tdserve stats``: the figures of one server, or of each of several."""

from __future__ import annotations

from typing import Any

import click

from tdserve.cli.info import make_fact_rows
from tdserve.cli.options import Inquiry, asks_server
from tdserve.cli.render import print_table


@click.command()
@asks_server
def stats(inquiry: Inquiry) -> None:
    """Show the figures of the server: workers, sessions, bytes by transport, free space; of several, those of each."""
    with inquiry.open_catalog() as client:
        facts = client.stats()
    inquiry.answer(facts, lambda: _show(facts))


def _show(facts: dict[str, Any]) -> None:
    if "servers" not in facts:
        print_table(("fact", "value"), make_fact_rows(facts))
        return
    rows = [(str(server), *row) for server, each in facts["servers"].items() for row in make_fact_rows(each)]
    rows += [(str(server), "state", "does not answer") for server in facts["lost"]]
    print_table(("server", "fact", "value"), rows, right=("server",))
