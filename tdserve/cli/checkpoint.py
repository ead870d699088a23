"""``tdserve checkpoint PLACE``: writes all stores, as they are at one moment, while they are used."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Any

import click

from tdserve.cli.options import Inquiry, asks_server
from tdserve.cli.progress import ProgressLine
from tdserve.cli.render import escape_unprintable, format_nbytes, print_lines, print_table

if TYPE_CHECKING:
    from tdserve.client.moves.checkpoint_writer import CheckpointProgress
    from tdserve.client.moves.manifest import Checkpoint


@click.command()
@click.argument("place")
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N checkpoints, this one included."
)
@click.option("--list", "lists", is_flag=True, help="Only list the checkpoints that the place has; asks no server.")
@asks_server
def checkpoint(inquiry: Inquiry, place: str, *, keep: int | None, lists: bool) -> None:
    """Write all stores of the server, as they are at one moment, to PLACE, while they are used.

    PLACE is a folder on this machine, or a URL of fsspec (s3://bucket/run) whose package is installed. A further
    checkpoint of the same place writes only what has changed. Of a cluster each server has a place of its own below:
    PLACE/server-0 and so on. `tdserve restore` brings stores back. Run it every hour by cron, or a systemd timer.
    """
    if lists:
        from tdserve.client.moves.server_checkpoints import find_server_place, list_checkpoints

        of_servers = (list_checkpoints(find_server_place(place, server)) for server in count())
        found = list_checkpoints(place) or list(chain.from_iterable(takewhile(bool, of_servers)))
        inquiry.answer([describe_checkpoint(each) for each in found], lambda: _print_list(found))
        return
    progress, began_s = CheckpointLine("checkpoint"), time.monotonic()
    with inquiry.connect() as client:
        try:
            made = client.checkpoint(place, keep=keep, on_progress=progress.show)
        finally:
            progress.end()
    written = made if isinstance(made, list) else [made]
    took_s = time.monotonic() - began_s
    inquiry.answer([describe_checkpoint(each) for each in written], lambda: _print_written(written, took_s))


class CheckpointLine(ProgressLine):
    """Shows how far a checkpoint is."""

    def show(self, progress: CheckpointProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            read, written = format_nbytes(progress.read_nbytes), format_nbytes(progress.written_nbytes)
            return f"{escape_unprintable(progress.store)}, {read} read, {written} written"

        self.write(compose, is_last=False)


def describe_checkpoint(made: Checkpoint) -> dict[str, Any]:
    """Returns what is shown of a checkpoint as JSON."""
    shown = ("id", "created_s", "nbytes", "written_nbytes", "paused_s", "left_out")
    return {**{name: getattr(made, name) for name in shown}, "stores": [store.name for store in made.stores]}


def _print_written(written: list[Checkpoint], took_s: float) -> None:
    for made in written:
        size = f"{format_nbytes(made.nbytes)}, {format_nbytes(made.written_nbytes)} of it new"
        click.echo(f"{made.id}: {len(made.stores)} stores, {size}, {took_s:.1f} s, paused {made.paused_s * 1e3:.0f} ms")
        print_lines(f"left out: {escape_unprintable(name)}" for name in made.left_out)


def _print_list(found: list[Checkpoint]) -> None:
    rows = [
        (
            made.id,
            f"{datetime.fromtimestamp(made.created_s, timezone.utc):%Y-%m-%d %H:%M:%S}",
            str(len(made.stores)),
            format_nbytes(made.nbytes),
        )
        for made in found
    ]
    print_table(("id", "UTC", "stores", "bytes"), rows, right=("stores", "bytes"))
