"""``tdserve put PATH NAME``: copies a file or folder into a new store, or appends its rows to a table."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import click

from tdserve.base.errors import InvalidRequestError, StoreNotFoundError, TDServeError
from tdserve.cli.files.import_rows import CALL_TIMEOUT_S, run_import
from tdserve.cli.screen.progress import RowProgress
from tdserve.cli.screen.render import escape_unprintable
from tdserve.cli.shell.options import Inquiry, ask_server


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Only this key, nested as a/b; may be repeated.")
@click.option("--force", is_flag=True, help="Replace a store NAME, also a table, once the first rows are read.")
@click.option("--progress/--no-progress", "shows", default=None, help="On stderr; by default if that is a terminal.")
@ask_server
def put(
    inquiry: Inquiry,
    path: Path,
    name: str,
    *,
    keys: tuple[str, ...],
    force: bool,
    shows: bool | None,
) -> None:
    """Copy what is at PATH into the new store NAME, by the format that its name ends with.

    That is .npz, .npy (its name is the key), .safetensors, .h5, .pt, .jsonl or a folder of TensorDict.memmap, as
    `tdserve get` writes them. Arrays that share their first dimension are rows; others make one tensordict without
    rows. Nothing is unpickled. The store appears when all of it is written.

    If NAME is a table or queue, the rows are appended to it, in pieces that writers' limits hold up as any others.
    They need all keys of the table; the first piece is checked before anything is written.
    """
    from tdserve.exports.file_formats import find_format  # imports torch

    kind = find_format(path)
    if not force and is_table(inquiry, name):
        run_append(inquiry, kind, str(path), name, shows, keys=keys)
    else:
        run_import(inquiry, kind, str(path), name, shows, keys=keys, has_rows=None, replaces=force)


def is_table(inquiry: Inquiry, name: str) -> bool:
    """Returns whether a store is a table or queue."""
    with inquiry.open_catalog() as client, suppress(StoreNotFoundError, InvalidRequestError):
        return bool(client.describe(name).capacity)
    return False


def run_append(inquiry: Inquiry, kind: str, path: str, name: str, shows: bool | None, *, keys: tuple[str, ...]) -> None:
    """Appends rows with progress, and prints how many; if it fails after some, these are named on stderr."""
    from tdserve.imports.table_import import append_rows  # imports torch

    progress, num_appended = RowProgress(name, shows=shows), 0

    def note(num_written: int, num_rows: int) -> None:
        nonlocal num_appended
        num_appended = num_written
        progress.show(num_written, num_rows)

    with inquiry.connect() as client:
        client.timeout_s = CALL_TIMEOUT_S
        try:
            append_rows(client, kind, path, name, keys=keys, on_progress=note)
        except (TDServeError, KeyboardInterrupt) as fault:
            progress.end()
            if num_appended or isinstance(fault, KeyboardInterrupt):
                click.echo(f"aborted: {num_appended} rows were appended to {escape_unprintable(name)}", err=True)
            if isinstance(fault, KeyboardInterrupt):
                raise click.Abort from None
            raise
        progress.end()
        described = client.describe(name)
    took_s = time.monotonic() - progress.begin_s
    shown = f"{escape_unprintable(name)}: {num_appended} rows appended, {described.num_rows} of {described.capacity} "
    shown += f"rows now, in {took_s:.1f} s"
    inquiry.answer({**described.as_dict(), "num_appended": num_appended}, lambda: click.echo(shown))
