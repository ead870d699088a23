"""``tdserve token new`` and ``tdserve token check``: entries of a server's file of tokens (``--tokens``)."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click

from tdserve.base.token_file import parse_document, read_content
from tdserve.cli.screen.render import print_json, print_table
from tdserve.rules.access.grants import Grant
from tdserve.rules.access.roles import ROLES
from tdserve.rules.access.token_entries import SALT_BYTES, check_name, encode_hash, read_entries

TOKEN_BYTES = 32


@click.group()
def token() -> None:
    """Tokens of a server with roles: makes one, and checks the file that has their hashes."""


@token.command()
@click.option("--name", required=True, help="Of the entry, in logs: 1 to 64 letters, digits, _ and -.")
@click.option("--role", type=click.Choice(list(ROLES)), required=True, help="What its holder may do.")
@click.option(
    "--stores",
    multiple=True,
    metavar="PATTERN",
    help="Names of stores and groups, such as 'replay*'; given once for each; all.",
)
@click.option("--expires", metavar="DATE", help="When it ends, such as 2027-01-31 or 2027-01-31T12:00:00Z.")
@click.option("--sessions", type=int, metavar="N", help="Most open sessions.")
@click.option("--requests", type=int, metavar="N", help="Most requests under way.")
@click.option("--held-bytes", metavar="SIZE", help="Most memory of those in the control process, such as 64M.")
@click.option("--rate", type=float, metavar="N", help="Most requests per second.")
@click.option("--file", "path", metavar="FILE", type=Path, help="Adds the entry to this file; a new one is JSON.")
def new(
    name: str, *, role: str, stores: tuple[str, ...], expires: str | None, path: Path | None, **limits: Any
) -> None:
    """Make a token and print it, once: the entry has only its hash.

    With --file the entry is added there, which a running server notices within a second, and the token is all that is
    printed. Otherwise the entry follows.
    """
    made = f"{check_name(name)}.{secrets.token_urlsafe(TOKEN_BYTES)}"
    given = {limit: value for limit, value in limits.items() if value is not None}
    entry: dict[str, Any] = {"name": name, "role": role, "stores": list(stores) or ["*"]}
    entry |= {"expires": expires} if expires else {}
    entry |= {"limits": given} if given else {}
    entry["hash"] = encode_hash(secrets.token_bytes(SALT_BYTES), made.encode())
    read_entries({"tokens": [entry]})
    if path is not None:
        _add_entry(path, entry)
        click.echo(made)
        return
    click.echo(made)
    click.echo(f"\n{json.dumps(entry, indent=2)}")
    click.echo(
        "\nThe first line is the token, which is shown only here; the rest goes into the file's tokens.", err=True
    )


@token.command()
@click.argument("path", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def check(path: str, *, as_json: bool) -> None:
    """Check a file of tokens, and list its entries without their hashes."""
    grants = [entry.grant for entry in read_entries(parse_document(read_content(path), path))]
    if as_json:
        print_json([dict(zip(_COLUMNS, _describe_grant(grant), strict=True)) for grant in grants])
    else:
        print_table(_COLUMNS, [_describe_grant(grant) for grant in grants])


_COLUMNS = ("name", "role", "stores", "expires", "limits")


def _describe_grant(grant: Grant) -> tuple[str, ...]:
    limits = ", ".join(f"{name} {value}" for name, value in grant.limits._asdict().items() if value is not None)
    expires = "-"
    if grant.expires_s < float("inf"):
        expires = datetime.fromtimestamp(grant.expires_s, timezone.utc).isoformat(timespec="minutes")
    return grant.name, grant.role.label, ", ".join(grant.stores), expires, limits or "-"


def _add_entry(path: Path, entry: dict[str, Any]) -> None:
    """Adds an entry to a file, which is replaced as a whole; raises InvalidRequestError if it is or becomes invalid.

    A link stays: what it points to is replaced.
    """
    path = Path(os.path.realpath(path))
    with _hold_folder(path.parent):
        before = read_content(str(path)) if path.exists() else b'{"tokens": []}'
        document = parse_document(before, str(path))
        read_entries(document)
        if before.lstrip().startswith(b"{"):
            document["tokens"].append(entry)
            after = json.dumps(document, indent=2) + "\n"
        else:
            after = f"{before.decode().rstrip()}\n\n{_format_toml(entry)}"
        read_entries(parse_document(after.encode(), str(path)))
        _replace(path, after)


@contextmanager
def _hold_folder(folder: Path) -> Iterator[None]:
    """Runs a block while no other command of this kind reads or replaces a file in this folder, else one of two would
    lose the entry of the other. The file itself cannot be locked: each command puts another one in its place."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # of a network's file system that has no such locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, content: str) -> None:
    """Replaces a file, or makes one that only its owner may read. Owner, group and mode stay, as far as allowed."""
    found = path.stat() if path.exists() else None
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            if found is not None:
                with suppress(PermissionError):  # of another owner's file: the folder allows to replace it
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
            os.fchmod(file.fileno(), 0o600 if found is None else found.st_mode & 0o777)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _format_toml(entry: dict[str, Any]) -> str:
    lines = ["[[tokens]]"]
    for name, value in entry.items():
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            inner = ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items())
            shown = f"{{ {inner} }}"
        lines.append(f"{name} = {shown}")
    return "\n".join(lines) + "\n"
