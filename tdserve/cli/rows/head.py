"""``tdserve head NAME``: the first rows of a store, read from the live server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path as FilePath
from urllib.parse import quote

import click

from tdserve.base.errors import InvalidRequestError
from tdserve.cli.rows.first_rows import Column, nest_leaves, read_first_columns
from tdserve.cli.screen.render import print_json, print_lines, print_table
from tdserve.cli.shell.options import Inquiry, ask_server, report_left_out, take_store

MAX_FILE_NAME = 120
"""Characters of a key in the name of a file."""


@click.command()
@take_store
@click.option("-n", "num_rows", type=click.IntRange(min=1), default=5, show_default=True, help="Rows to show.")
@click.option(
    "--images",
    "folder",
    type=click.Path(file_okay=False, path_type=FilePath),
    metavar="DIR",
    help="Write a PNG file of each image here too.",
)
@ask_server
def head(inquiry: Inquiry, name: str, num_rows: int, folder: FilePath | None) -> int:
    """Show the first rows of store NAME: live rows of a table, the newest version of weights, entries of a keyed store.

    Rows of a table that are read here do not count as sampled. With --images each uint8 tensor of a row that looks like
    an image (two dimensions of at least 8, and 1, 3 or 4 channels) becomes DIR/KEY-ROW.png; files there are replaced.
    """
    with inquiry.connect() as client:
        content, leaves = read_first_columns(client, name, num_rows)
        code = report_left_out(client, name)
    written = [] if folder is None else write_images(leaves, folder)
    if inquiry.as_json:
        found = {"name": name, "batch_size": list(content.batch_size), "data": nest_leaves(leaves)}
        print_json(found if folder is None else {**found, "images": list(map(str, written))})
        return code
    shown = [f"row {i}" for i in range(content.batch_size[0])] if content.batch_size else ["value"]
    print_table(("key", "type", *shown), (leaf.make_cells(len(shown)) for leaf in leaves))
    if folder is not None:
        print_lines([f"{len(written)} images in {folder}"])
    return code


def write_images(leaves: Iterable[Column], folder: FilePath) -> list[FilePath]:
    """Writes a PNG file of each image among some leaves, and returns their paths.

    Raises:
        InvalidRequestError: The folder cannot be made, or a file not written.
    """
    from tdserve.cli.rows.pictures import encode_png, find_pixels, to_array  # imports NumPy

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leaf in leaves:
            rows = leaf.value if leaf.is_per_row else [leaf.value]
            for number, value in enumerate(rows):
                array = to_array(value)
                pixels = None if array is None else find_pixels(array)
                if pixels is not None:
                    name = quote(".".join(leaf.path), safe="")[:MAX_FILE_NAME]
                    written.append(folder / f"{name}-{number}.png")
                    written[-1].write_bytes(encode_png(pixels))
    except OSError as fault:
        raise InvalidRequestError(argument="--images", reason=f"{folder}: {fault.strerror}") from fault
    return written
