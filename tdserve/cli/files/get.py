"""``tdserve get NAME PATH``: writes the content of a store into a file or folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from tdserve.cli.screen.progress import RowProgress
from tdserve.cli.screen.render import escape_unprintable, format_nbytes
from tdserve.cli.shell.options import Inquiry, ask_server, take_store


@click.command()
@take_store
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Only this key, nested as a/b; may be repeated.")
@click.option("--version", type=int, metavar="N", help="Of weights: this version; by default the newest.")
@click.option("--force", is_flag=True, help="Replace a file or folder that exists.")
@click.option("--progress/--no-progress", "shows", default=None, help="On stderr; by default if that is a terminal.")
@ask_server
def get(
    inquiry: Inquiry,
    name: str,
    path: Path,
    *,
    keys: tuple[str, ...],
    version: int | None,
    force: bool,
    shows: bool | None,
) -> None:
    """Write the content of store NAME into PATH, in the format that its name ends with.

    \b
    .npz          a NumPy archive; nested keys with slashes
    .npy          one array of NumPy; of several keys, --key chooses
    .safetensors  the same, tensors only
    .h5           HDF5; nested keys are groups
    .pt           tensors in dicts, for torch.load(weights_only=True)
    .jsonl        a line of JSON for each row; nested keys are objects, NaN and infinities null
    no ending     a folder of TensorDict.memmap

    Rows are read in pieces; the file appears when it is whole. `tdserve put` reads all of these. .pt and .jsonl also
    take rows that differ in shape, such as the token ids of chats. Entries of a keyed store are rows if all have one
    structure, and the column "key" has their keys; others are at their keys.
    """
    from tdserve.exports import export_store  # imports torch
    from tdserve.imports.import_source import split_key

    progress = RowProgress(name, shows=shows)
    with inquiry.connect() as client:
        try:
            export_store(
                client,
                name,
                path,
                keys=[split_key(key) for key in keys],
                version=version,
                replaces=force,
                on_progress=progress.show,
            )
        finally:
            progress.end()
    nbytes = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else os.path.getsize(path)
    took_s = time.monotonic() - progress.begin_s
    shown = f"{escape_unprintable(str(path))}: {format_nbytes(nbytes)} in {took_s:.1f} s"
    inquiry.answer({"path": str(path), "nbytes": nbytes, "seconds": took_s}, lambda: click.echo(shown))
