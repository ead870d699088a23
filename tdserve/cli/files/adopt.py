"""``tdserve adopt PATH NAME``: serves a folder that tensordict has written, in place."""

from __future__ import annotations

from pathlib import Path

import click

from tdserve.cli.screen.render import escape_unprintable, format_nbytes, print_json
from tdserve.cli.shell.options import Inquiry, ask_server

ADOPTION_TIMEOUT_S = 120.0
"""Every file is checked: a folder of 100,000 leaves takes some seconds, longer on a remote disk."""


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--read-only", is_flag=True, help="Refuse every write; the files need not be writable.")
@click.option("--exist-ok", "exists_ok", is_flag=True, help="Succeed if it was adopted in the same way before.")
@ask_server
def adopt(
    inquiry: Inquiry,
    path: Path,
    name: str,
    read_only: bool,
    exists_ok: bool,
) -> None:
    """Serve the memory-mapped tensordict in folder PATH as store NAME, without copying it.

    Writes to the store change the files in PATH, unless --read-only is given. Deleting the store leaves them as
    they are.
    """
    with inquiry.connect() as client:
        client.adopt(path, name, read_only=read_only, exists_ok=exists_ok, timeout_s=ADOPTION_TIMEOUT_S)
        described = client.describe(name)
    if inquiry.as_json:
        print_json(described.as_dict())
        return
    how = ", read-only" if described.read_only else ""
    shape = list(described.batch_size)
    click.echo(
        f"{escape_unprintable(name)}: {escape_unprintable(described.adopted)}, batch size {shape}, "
        f"{format_nbytes(described.nbytes)}{how}"
    )
