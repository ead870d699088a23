"""``tdserve rebalance``: moves stores from server to server of a cluster, or all of them away from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from tdserve.base.errors import TDServeError
from tdserve.cli.screen.progress import MovedBytes
from tdserve.cli.screen.render import escape_unprintable, print_lines
from tdserve.cli.shell.completion import complete_stores
from tdserve.cli.shell.exit_codes import find_exit_code
from tdserve.cli.shell.lasting import print_error
from tdserve.cli.shell.options import Inquiry, ask_server

if TYPE_CHECKING:
    from tdserve.client.cluster.cluster_client import ClusterClient


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_stores)
@click.option("--to", "server", type=click.IntRange(min=0), help="Number of the new server, from 0. [default: by hash]")
@click.option("--drain", "drained", type=click.IntRange(min=0), help="Move all stores away from this server instead.")
@click.option("--dry-run", is_flag=True, help="Only print what would move.")
@ask_server
def rebalance(
    inquiry: Inquiry, names: tuple[str, ...], *, server: int | None, drained: int | None, dry_run: bool
) -> int:
    """Move the stores NAME, or parts of shared ones (NAME#2), while they are used.

    Without --to a store moves to the server that the hash of its name chooses, as for a new store: so stores spread
    over servers that have joined. What cannot move is named, and the others move. The cluster is given as to every
    command: --address a:7707,b:7707,c:7707
    """
    if bool(names) == (drained is not None):
        raise click.UsageError("name the stores that move, or give --drain with a server")
    if drained is not None and server is not None:
        raise click.UsageError("--drain chooses the new servers by itself")
    moves: list[Move] = []
    failures: list[TDServeError] = []
    with inquiry.connect_cluster() as client:
        planned = client.list_stores_at(drained) if drained is not None else names
        for name in planned:
            try:
                moves.append(_move(client, name, server, drained, dry_run=dry_run))
            except TDServeError as error:  # the others move all the same
                print_error(error)
                failures.append(error)
    document = [{"name": move.name, "from": move.before, "to": move.target} for move in moves]
    inquiry.answer(document, lambda: print_lines(move.describe(dry_run=dry_run) for move in moves))
    return find_exit_code(failures[0]) if failures else 0


class Move(NamedTuple):
    """What was done with a store.

    Attributes:
        before, target: Numbers of its servers; equal ones if nothing was to be done.
    """

    name: str
    before: int
    target: int

    def describe(self, *, dry_run: bool) -> str:
        """Returns the line that shows it."""
        name = escape_unprintable(self.name)
        if self.before == self.target:
            return f"{name}: is on server {self.target}"
        return f"{name}: {'would move' if dry_run else 'moved'} from server {self.before} to {self.target}"


def _move(client: ClusterClient, name: str, server: int | None, drained: int | None, *, dry_run: bool) -> Move:
    """Moves one store, unless it is where it belongs."""
    client.describe(name)  # raises StoreNotFoundError
    before = client.find_server(name)
    if drained is not None:
        target = client.choose_refuge(name, drained)
    else:
        target = client.directory.get_owner(name) if server is None else server
    if not dry_run:
        progress = MovedBytes(name)
        client.rebalance(name, target, on_progress=progress.show)
        progress.end()
    return Move(name, before, target)
