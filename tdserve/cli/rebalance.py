"""``tdserve rebalance``: moves stores from server to server of a cluster, or all of them away from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from tdserve.cli.completion import complete_stores
from tdserve.cli.options import Inquiry, asks_server
from tdserve.cli.progress import ByteProgress
from tdserve.cli.render import escape_unprintable, print_lines

if TYPE_CHECKING:
    from tdserve.client.cluster.cluster_client import ClusterClient


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_stores)
@click.option("--to", "server", type=click.IntRange(min=0), help="Number of the new server, from 0. [default: by hash]")
@click.option("--drain", "drained", type=click.IntRange(min=0), help="Move all stores away from this server instead.")
@click.option("--dry-run", is_flag=True, help="Only print what would move.")
@asks_server
def rebalance(
    inquiry: Inquiry, names: tuple[str, ...], *, server: int | None, drained: int | None, dry_run: bool
) -> None:
    """Move the stores NAME, or parts of shared ones (NAME#2), while they are used.

    Without --to a store moves to the server that the hash of its name chooses, as for a new store: so stores spread
    over servers that have joined. The cluster is given as to every command: --address a:7707,b:7707,c:7707
    """
    if bool(names) == (drained is not None):
        raise click.UsageError("name the stores that move, or give --drain with a server")
    if drained is not None and server is not None:
        raise click.UsageError("--drain chooses the new servers by itself")
    moves = []
    with inquiry.connect_cluster() as client:
        for name, target in _plan(client, names, server, drained):
            before = client.find_server(name)
            if before != target and not dry_run:
                progress = ByteProgress(name)
                client.rebalance(name, target, on_progress=progress.show)
                progress.end()
            moves.append(Move(name, before, target))
    document = [{"name": move.name, "from": move.before, "to": move.target} for move in moves]
    inquiry.answer(document, lambda: print_lines(move.describe(dry_run=dry_run) for move in moves))


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


def _plan(
    client: ClusterClient, names: tuple[str, ...], server: int | None, drained: int | None
) -> list[tuple[str, int]]:
    """Returns the stores that move, and where to."""
    if drained is not None:
        return client.plan_drain(drained)
    return [(name, client.directory.get_owner(name) if server is None else server) for name in names]
