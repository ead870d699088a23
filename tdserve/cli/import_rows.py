"""``tdserve import FORMAT PATH NAME``: copies files and data sets of other libraries into a new store."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from tdserve.base.errors import StoreNotFoundError, TDServeError
from tdserve.cli.options import CONNECT_TIMEOUT_S, Inquiry, asks_server
from tdserve.cli.render import escape_unprintable, format_nbytes, print_json

if TYPE_CHECKING:
    from tdserve.client.client import Client

FORMATS = ("minari", "hf", "hdf5", "npz")
"""Names as of ``tdserve.imports.formats``, which imports torch."""

CALL_TIMEOUT_S = 60.0
"""For each piece of the import; a person can end it at any time."""

SHOWN_EVERY_S = 0.2
LOGGED_EVERY_S = 5.0


@click.command("import")
@click.argument("kind", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("path")
@click.argument("name")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Only this key, nested as a/b; may be repeated.")
@click.option("--split", default="", help="hf: which split, if the data set has several.")
@click.option("--no-rows", "is_whole", is_flag=True, help="npz, hdf5: arrays of any sizes, as one row; all in memory.")
@click.option("--replace", "replaces", is_flag=True, help="Delete a store NAME once the first rows are read.")
@click.option("--progress/--no-progress", "shows", default=None, help="On stderr; by default if that is a terminal.")
@asks_server
def import_rows(
    inquiry: Inquiry,
    *,
    kind: str,
    path: str,
    name: str,
    keys: tuple[str, ...],
    split: str,
    is_whole: bool,
    replaces: bool,
    shows: bool | None,
) -> None:
    """Copy what is at PATH into the new store NAME.

    \b
    npz     a NumPy archive; arrays with a common first dimension are rows
    hdf5    an HDF5 file; the same, and groups are nested keys
    hf      Hugging Face datasets: a folder of save_to_disk, a .parquet,
            .jsonl or .csv file, or a name on the Hub
    minari  a Minari data set, its folder or its id: steps of all episodes

    The store appears when all rows are written: an import that fails or is killed leaves nothing under NAME. PATH is
    read and stays as it is, while `tdserve adopt` serves a folder of tensordict's own format in place.
    """
    from tdserve.imports.store_import import import_store  # imports torch

    begin = time.monotonic()
    progress = _ImportProgress(name, begin, is_terminal=sys.stderr.isatty())
    is_shown = progress.is_terminal if shows is None else shows
    with inquiry.connect() as connected:
        client = connected.get_home(name)
        client.catalog.timeout_s = CALL_TIMEOUT_S
        older = _find_uid(client, name)
        try:
            import_store(
                client,
                kind,
                path,
                name,
                keys=keys,
                split=split,
                has_rows=not is_whole,
                replaces=replaces,
                on_progress=progress.show if is_shown else lambda num_written, num_rows: None,
            )
        except KeyboardInterrupt:
            progress.end()
            click.echo(f"aborted: {_find_outcome(client, name, older)}", err=True)
            raise click.Abort from None
        finally:
            progress.end()
        described = client.describe(name)
    if inquiry.as_json:
        print_json(described.as_dict())
        return
    took_s = time.monotonic() - begin
    size = format_nbytes(described.nbytes)
    click.echo(f"{escape_unprintable(name)}: batch size {list(described.batch_size)}, {size} in {took_s:.1f} s")


def _find_uid(client: Client, name: str) -> str:
    """Returns the identity of a store; "" if there is none."""
    try:
        return client.describe(name, timeout_s=0).uid
    except StoreNotFoundError:
        return ""


def _find_outcome(client: Client, name: str, older: str) -> str:
    """Returns what an import that was interrupted has left.

    Args:
        client: The client of the import.
        name: Name of the store.
        older: Identity of the store of this name before the import; "" if there was none.
    """
    client.catalog.timeout_s = CONNECT_TIMEOUT_S  # people who interrupt may do so because the server is gone
    try:
        found = _find_uid(client, name)
    except TDServeError as error:
        return f"unless all was stored already, the server keeps nothing of it; it does not answer: {error}"
    shown = escape_unprintable(name)
    if found and found != older:
        return f"{shown} was already complete, and is kept"
    if older and not found:
        return f"nothing was stored, and the {shown} that was to be replaced is already deleted"
    return f"nothing was stored, and {shown} is as it was" if older else "nothing was stored"


class _ImportProgress:
    """Shows how far an import is, on one line of a terminal, or now and then on a line of its own.

    Args:
        name: Name of the store.
        begin: When it began, on the monotonic clock.
        is_terminal: Whether stderr is a terminal.
    """

    def __init__(self, name: str, begin: float, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._name = escape_unprintable(name)
        self._begin = begin
        self._shown = begin
        self._has_line = False

    def show(self, num_written: int, num_rows: int) -> None:
        """Shows the state, unless it was shown a moment ago."""
        now = time.monotonic()
        if now - self._shown < (SHOWN_EVERY_S if self.is_terminal else LOGGED_EVERY_S) and num_written < num_rows:
            return
        self._shown = now
        rate = num_written / max(now - self._begin, 1e-9)
        percent = 100 * num_written // num_rows
        text = f"{self._name}: {num_written:,} of {num_rows:,} rows ({percent} %), {rate:,.0f} rows/s"
        click.echo(f"\r{text}\x1b[K" if self.is_terminal else text, err=True, nl=not self.is_terminal)
        self._has_line = self.is_terminal

    def end(self) -> None:
        """Ends the line of the terminal."""
        if self._has_line:
            click.echo(err=True)
        self._has_line = False
