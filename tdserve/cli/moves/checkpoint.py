"""``tdserve checkpoint PLACE``: writes all stores, as they are at one moment, while they are used."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tdserve.cli.screen.progress import ProgressLine
from tdserve.cli.screen.render import escape_unprintable, format_nbytes, print_lines, print_table
from tdserve.cli.shell.exit_codes import DAMAGED
from tdserve.cli.shell.options import Inquiry, ask_server

if TYPE_CHECKING:
    from tdserve.client.moves.checkpoint_writer import CheckpointProgress
    from tdserve.client.moves.manifest import Checkpoint


@click.command()
@click.argument("place")
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N checkpoints, this one included."
)
@click.option("--list", "lists", is_flag=True, help="Only list the checkpoints that the place has; asks no server.")
@ask_server
def checkpoint(inquiry: Inquiry, place: str, *, keep: int | None, lists: bool) -> int:
    """Write all stores of the server, as they are at one moment, to PLACE, while they are used.

    PLACE is a folder on this machine, or a URL of fsspec (s3://bucket/run) whose package is installed. A further
    checkpoint of the same place writes only what has changed. Of a cluster each server has a place of its own below:
    PLACE/server-0 and so on. `tdserve restore` brings stores back. Run it every hour by cron, or a systemd timer.
    """
    if place.startswith("memory://"):
        raise click.BadParameter("memory:// is the memory of this command, which ends", param_hint="PLACE")
    if lists:
        found = _list_place(place)
        inquiry.answer([each.describe() for each in found], lambda: _print_list(found))
        damaged = [each.made for each in found if each.made.damage]
        for one in damaged:
            remedy = "says what to do" if one.stores else "--repair removes it"
            click.echo(f"{one.id} cannot be restored: {one.damage}; tdserve check PLACE {remedy}", err=True)
        return DAMAGED if damaged else 0
    progress, began_s = CheckpointLine("checkpoint"), time.monotonic()
    with inquiry.connect() as client:
        try:
            made = client.checkpoint(place, keep=keep, on_progress=progress.show)
        finally:
            progress.end()
    written = (
        [MadeOf(server, each) for server, each in enumerate(made)] if isinstance(made, list) else [MadeOf(None, made)]
    )
    took_s = time.monotonic() - began_s
    inquiry.answer([each.describe() for each in written], lambda: _print_written(written, took_s))
    return 0


class CheckpointLine(ProgressLine):
    """Shows how far a checkpoint is."""

    def show(self, progress: CheckpointProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            read, written = format_nbytes(progress.read_nbytes), format_nbytes(progress.written_nbytes)
            return f"{escape_unprintable(progress.store)}, {read} read, {written} written"

        self.write(compose, is_last=False)


class MadeOf(NamedTuple):
    """A checkpoint, and the number of the server whose it is; None if it is not that of a cluster."""

    server: int | None
    made: Checkpoint

    def describe(self) -> dict[str, Any]:
        """Returns what is shown of it as JSON."""
        shown = ("id", "created_s", "nbytes", "written_nbytes", "paused_s", "left_out", "server_id", "damage")
        facts = {name: getattr(self.made, name) for name in shown}
        return {"server": self.server, **facts, "stores": [store.name for store in self.made.stores]}


def _list_place(place: str) -> list[MadeOf]:
    """Returns the checkpoints of a place, those of a cluster server by server.

    Raises:
        InvalidRequestError: There is no such place.
    """
    from tdserve.client.moves.server_checkpoints import check_exists, list_checkpoints, list_server_places

    check_exists(place)
    if own := list_checkpoints(place):
        return [MadeOf(None, made) for made in own]
    of_servers = list_server_places(place).items()
    return [MadeOf(server, made) for server, below in of_servers for made in list_checkpoints(below)]


def _print_written(written: list[MadeOf], took_s: float) -> None:
    for server, made in written:
        of = "" if server is None else f"server {server}: "
        size = f"{format_nbytes(made.nbytes)}, {format_nbytes(made.written_nbytes)} of it new"
        paused = f"paused {made.paused_s * 1e3:.0f} ms"
        click.echo(f"{of}{made.id}: {len(made.stores)} stores, {size}, {took_s:.1f} s, {paused}")
        print_lines(f"left out: {escape_unprintable(name)}" for name in made.left_out)


def _print_list(found: list[MadeOf]) -> None:
    is_of_cluster = any(each.server is not None for each in found)
    rows = [
        (
            *([str(server)] if is_of_cluster else []),
            made.id,
            f"{datetime.fromtimestamp(made.created_s, timezone.utc):%Y-%m-%d %H:%M:%S}",
            str(len(made.stores)) if made.stores or not made.damage else "?",
            "damaged" if made.damage else format_nbytes(made.nbytes),
        )
        for server, made in found
    ]
    names = (*(["server"] if is_of_cluster else []), "id", "UTC", "stores", "bytes")
    print_table(names, rows, right=("server", "stores", "bytes"))
