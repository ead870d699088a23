"""``tdserve put PATH NAME``: copies a file or folder into a new store."""

from __future__ import annotations

from pathlib import Path

import click

from tdserve.cli.import_rows import run_import
from tdserve.cli.options import Inquiry, asks_server


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Only this key, nested as a/b; may be repeated.")
@click.option("--force", is_flag=True, help="Replace a store NAME once the first rows are read.")
@click.option("--progress/--no-progress", "shows", default=None, help="On stderr; by default if that is a terminal.")
@asks_server
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

    That is .npz, .safetensors, .h5, .pt or a folder of TensorDict.memmap, as `tdserve get` writes them. Arrays that
    share their first dimension are rows; others make one tensordict without rows. Nothing is unpickled. The store
    appears when all of it is written.
    """
    from tdserve.exports.file_formats import find_format  # imports torch

    kind = find_format(path)
    run_import(inquiry, kind, str(path), name, shows, keys=keys, has_rows=None, replaces=force)
