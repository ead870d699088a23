"""``tdserve restore PLACE``: brings stores of a checkpoint back, to a server that runs or to a root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

import tdserve
from tdserve.base.errors import InvalidRequestError
from tdserve.cli.options import Inquiry, asks_server
from tdserve.cli.progress import ProgressLine
from tdserve.cli.render import escape_unprintable, format_nbytes, print_lines
from tdserve.server.checking.catalog_repairs import remove_file
from tdserve.store.root import Root

if TYPE_CHECKING:
    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient
    from tdserve.client.moves.checkpoint_restore import RestoreProgress


@click.command()
@click.argument("place")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--checkpoint", metavar="ID", help="Which one, as `tdserve checkpoint --list` shows. [default: the newest]"
)
@click.option(
    "--prefix", default="", metavar="TEXT", help="Put in front of each name, to restore beside what is there."
)
@click.option("--root", type=click.Path(path_type=Path), help="Restore into this root, which no server has open.")
@asks_server
def restore(
    inquiry: Inquiry, place: str, names: tuple[str, ...], *, checkpoint: str | None, prefix: str, root: Path | None
) -> None:
    """Bring the stores NAME of a checkpoint back, or all of them, as new stores; others go on.

    Nothing is restored if a name is taken. Of a cluster, each server gets the stores of its number.
    """
    progress = RestoreLine("restore")
    with ExitStack() as stack:
        client: Client | ClusterClient
        if root is not None:
            folder = stack.enter_context(_stage(root))
            client = stack.enter_context(stack.enter_context(tdserve.Server(folder, port=0).start()).client())
        else:
            client = inquiry.connect()
            stack.callback(client.close)
        try:
            found = client.restore(
                place, checkpoint=checkpoint, names=names or None, prefix=prefix, on_progress=progress.show
            )
        finally:
            progress.end()
    inquiry.answer(found, lambda: print_lines(escape_unprintable(name) for name in found))


@contextmanager
def _stage(root: Path) -> Iterator[Path]:
    """A block in which a new root is made beside its place, which it takes at the end: an error leaves nothing, and a
    kill a folder that the next attempt removes. A folder that exists is used where it is.

    Raises:
        RootInUseError: Another restore makes this root.
    """
    if root.exists():
        is_empty = root.is_dir() and not any(root.iterdir())
        try:
            yield root
        except BaseException:
            for path in root.iterdir() if is_empty else ():
                remove_file(path)
            raise
        return
    staged = root.absolute().with_name(f".{root.name}.restoring")
    with suppress(InvalidRequestError):  # it is not there, or has nothing of a root
        Root.acquire_for_check(staged).release()
    shutil.rmtree(staged, ignore_errors=True)
    try:
        yield staged
        staged.rename(root)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


class RestoreLine(ProgressLine):
    """Shows how far a restore is."""

    def show(self, progress: RestoreProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            done, total = format_nbytes(progress.nbytes), format_nbytes(progress.total_nbytes)
            return f"{escape_unprintable(progress.store)}, {done} of {total}"

        self.write(compose, is_last=False)
