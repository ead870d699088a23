"""``tdserve rm NAME...``: deletes stores, or entries of a keyed store."""

from __future__ import annotations

import sys

import click

from tdserve.base.errors import StoreNotFoundError
from tdserve.cli.screen.render import escape_unprintable, print_lines
from tdserve.cli.shell.completion import complete_stores
from tdserve.cli.shell.options import Inquiry, ask_server


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_stores)
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Delete only this entry of the keyed store NAME.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without a terminal nothing is asked.")
@click.option("--missing-ok", is_flag=True, help="Succeed if there is none.")
@ask_server
def rm(inquiry: Inquiry, names: tuple[str, ...], *, keys: tuple[str, ...], yes: bool, missing_ok: bool) -> None:
    """Delete the stores NAME with all their content, or entries of one; an adopted folder stays as it is.

    They are deleted one after the other; the first error ends the command.
    """
    if keys and len(names) > 1:
        raise click.UsageError("--key is for one store")
    if not yes and sys.stdin.isatty():
        what = f"{len(keys)} entries of {escape_unprintable(names[0])}" if keys else _list(names)
        click.confirm(f"Delete {what}?", abort=True, err=True)
    deleted = []
    with inquiry.connect() as client:
        if keys:
            kv = client.kv(names[0], timeout_s=0)
            deleted = [key for key in keys if kv.delete(key, missing_ok=missing_ok)]
        for name in () if keys else names:
            try:
                client.delete(name)
            except StoreNotFoundError:
                if not missing_ok:
                    raise
            else:
                deleted.append(name)
    inquiry.answer({"deleted": deleted}, lambda: print_lines(f"deleted {escape_unprintable(name)}" for name in deleted))


def _list(names: tuple[str, ...]) -> str:
    return f"{len(names)} stores" if len(names) > 5 else ", ".join(map(escape_unprintable, names))
