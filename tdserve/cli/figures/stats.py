"""``tdserve stats``: the figures of one server, or of each of several."""

from __future__ import annotations

import click

from tdserve.cli.screen.hidden_figures import mark_hidden
from tdserve.cli.shell.options import Inquiry, ask_server, report_lost
from tdserve.cli.stores.info import show_stats


@click.command()
@ask_server
def stats(inquiry: Inquiry) -> int:
    """Show the figures of the server: workers, sessions, bytes by transport, free space; of several, those of each."""
    with inquiry.open_catalog() as client:
        facts = mark_hidden(client.stats())
    inquiry.answer(facts, lambda: show_stats(facts))
    return report_lost(client)
