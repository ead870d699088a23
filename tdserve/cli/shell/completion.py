"""``tdserve completion SHELL``: completion of commands, options and names of stores."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from tdserve.base.config import ClientConfig, read_token

if TYPE_CHECKING:
    from click import Context, Parameter

SHELLS = ("bash", "zsh", "fish")

COMPLETE_VARIABLE = "_TDSERVE_COMPLETE"
"""By which the shell's script asks the command what there is."""

COMPLETE_TIMEOUT_S = 1.0
"""A person presses tab, and is waiting."""

MAX_COMPLETED = 500
"""More names are no help in choosing one."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and names of stores.

    \b
    bash  eval "$(tdserve completion bash)"            in ~/.bashrc
    zsh   eval "$(tdserve completion zsh)"             in ~/.zshrc
    fish  tdserve completion fish > ~/.config/fish/completions/tdserve.fish
    """
    made = get_completion_class(shell)
    if made is not None:
        click.echo(made(context.find_root().command, {}, "tdserve", COMPLETE_VARIABLE).source())


def complete_stores(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the stores whose names begin so; none if the server does not answer in time."""
    found: list[CompletionItem] = []
    logging.disable()  # a warning that no server answers would stand in the middle of the line
    with suppress(Exception):  # a completion has no place for an error
        found = [CompletionItem(name) for name in _list_stores(context, incomplete) if name.isprintable()]
    return found[:MAX_COMPLETED]


def _list_stores(context: Context, prefix: str) -> list[str]:
    from tdserve.client.cluster.servers.membership import is_of_cluster
    from tdserve.client.session.catalog.catalog_client import CatalogClient
    from tdserve.rules.placement import find_whole

    given: dict[str, Any] = context.params
    settings = ClientConfig.from_env()
    address = given.get("address") or settings.address
    token_file = given.get("token_file")
    token = settings.find_token() if token_file is None else read_token(token_file, "--token-file")
    names: set[str] = set()
    options: dict[str, Any] = {"token": token, "timeout_s": COMPLETE_TIMEOUT_S, "tls": settings.find_tls()}
    for server in address.split(",") if is_of_cluster(address) else [address]:
        with suppress(Exception), CatalogClient(server, **options) as client:
            names.update(client.stores(prefix))
    return sorted(name for name in names if find_whole(name) is None)
