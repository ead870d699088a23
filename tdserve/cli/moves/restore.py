"""``tdserve restore PLACE``: brings stores of a checkpoint back, to a server that runs or to a root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

import tdserve
from tdserve.base.errors import InvalidRequestError, RootInUseError
from tdserve.cli.screen.progress import ProgressLine
from tdserve.cli.screen.render import escape_unprintable, format_nbytes, print_lines
from tdserve.cli.shell.options import Inquiry, ask_server
from tdserve.store.roots.root import RESTORING_FOLDER, Root, move_staged_root

if TYPE_CHECKING:
    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient
    from tdserve.client.moves.checkpoint_restore import RestoreProgress

_LOST_AND_FOUND = "lost+found"
"""A folder that a new file system has: it is empty all the same."""


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
@ask_server
def restore(
    inquiry: Inquiry, place: str, names: tuple[str, ...], *, checkpoint: str | None, prefix: str, root: Path | None
) -> None:
    """Bring the stores NAME of a checkpoint back, or all of them, as new stores; others are unaffected.

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
    """A block in which a new root is made in a folder of its place, whose files take the place at the end.

    An error leaves nothing. A kill leaves that folder: no server starts there then, and the next attempt removes it. A
    root that exists is used where it is.

    Raises:
        RootInUseError: Another restore makes this root.
    """
    exists, staged = root.exists(), root / RESTORING_FOLDER
    if exists and (not root.is_dir() or {path.name for path in root.iterdir()} - {RESTORING_FOLDER, _LOST_AND_FOUND}):
        yield root
        return
    with suppress(InvalidRequestError):  # it is not there, or has nothing of a root
        Root.acquire_for_check(staged).release()
    shutil.rmtree(staged, ignore_errors=True)
    try:
        yield staged
    except RootInUseError:
        raise
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if not exists:
            with suppress(OSError):  # something else is there by now, or nothing
                root.rmdir()
        raise
    move_staged_root(root)


class RestoreLine(ProgressLine):
    """Shows how far a restore is."""

    def show(self, progress: RestoreProgress) -> None:
        """Shows the state, unless it was shown a moment ago."""

        def compose() -> str:
            done, total = format_nbytes(progress.nbytes), format_nbytes(progress.total_nbytes)
            return f"{escape_unprintable(progress.store)}, {done} of {total}"

        self.write(compose, is_last=False)
