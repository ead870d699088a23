"""``tdserve import FORMAT PATH NAME``: copies files and data sets of other libraries into a new store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from tdserve.base.errors import StoreNotFoundError, TDServeError
from tdserve.cli.screen.progress import RowProgress
from tdserve.cli.screen.render import escape_unprintable, format_nbytes
from tdserve.cli.shell.options import CONNECT_TIMEOUT_S, Inquiry, ask_server

if TYPE_CHECKING:
    from tdserve.client.client import Client

FORMATS = ("minari", "hf", "jsonl", "hdf5", "npz", "npy", "safetensors", "pt", "memmap")
"""Names as in ``tdserve.imports.formats``, which imports torch."""

CALL_TIMEOUT_S = 60.0
"""For each piece of the import; a person can end it at any time."""


@click.command("import")
@click.argument("kind", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("path")
@click.argument("name")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Only this key, nested as a/b; may be repeated.")
@click.option("--split", default="", help="hf: which split, if the data set has several.")
@click.option("--no-rows", "is_whole", is_flag=True, help="npz, hdf5: arrays of any sizes, as one row; all in memory.")
@click.option("--replace", "replaces", is_flag=True, help="Delete a store NAME once the first rows are read.")
@click.option("--progress/--no-progress", "shows", default=None, help="On stderr; by default if that is a terminal.")
@ask_server
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
    npy     one array of NumPy, whose key is the name of the file
    hdf5    an HDF5 file; the same, and groups are nested keys
    jsonl   a JSON object in each line; lists of numbers are tensors, all
            else is kept as it is
    hf      Hugging Face datasets: a folder of save_to_disk, a .parquet,
            .jsonl or .csv file, or a name on the Hub
    minari  a Minari data set, its folder or its id: steps of all episodes
    safetensors, pt, memmap
            a file of safetensors, tensors that torch.save has written, a
            folder of TensorDict.memmap; `tdserve put` detects them by name

    The store appears when all rows are written: an import that fails or is killed leaves nothing under NAME. PATH is
    read and stays as it is, while `tdserve adopt` serves a folder of tensordict's own format in place.
    """
    run_import(inquiry, kind, path, name, shows, keys=keys, split=split, has_rows=not is_whole, replaces=replaces)


def run_import(inquiry: Inquiry, kind: str, path: str, name: str, shows: bool | None, **options: Any) -> None:
    """Imports with progress, and prints what was made; options as in ``import_store``."""
    from tdserve.imports.store_import import import_store  # imports torch

    progress = RowProgress(name, shows=shows)
    with inquiry.connect() as connected:
        client = connected.get_home(name)
        client.catalog.timeout_s = CALL_TIMEOUT_S
        older = _find_uid(client, name)
        try:
            import_store(client, kind, path, name, **options, on_progress=progress.show)
        except KeyboardInterrupt:
            progress.end()
            click.echo(f"aborted: {_find_outcome(client, name, older)}", err=True)
            raise click.Abort from None
        finally:
            progress.end()
        described = client.describe(name)
    took_s = time.monotonic() - progress.begin_s
    size = format_nbytes(described.nbytes)
    shown = f"{escape_unprintable(name)}: batch size {list(described.batch_size)}, {size} in {took_s:.1f} s"
    inquiry.answer(described.as_dict(), lambda: click.echo(shown))


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
