"""``tdserve health``: a health check of a server; the answer is the exit code."""

from __future__ import annotations

import time
from typing import Any

import click

from tdserve.base.config import ClientConfig
from tdserve.base.errors import TDServeError
from tdserve.cli.render import print_json, to_one_line
from tdserve.client.cluster.membership import is_of_cluster, read_membership
from tdserve.control.connection import check_health

CHECK_TIMEOUT_S = 3.0
"""Timeout of one check: orchestrators allow a few seconds, including the start of Python."""

POLL_INTERVAL_S = 0.2
"""Pause between two checks of a command that waits."""

SERVING = "SERVING"


@click.command()
@click.option("--address", metavar="HOST:PORT", help="The server, or HOST:PORT,HOST:PORT; else $TDSERVE_ADDRESS.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0.0), default=0.0, metavar="SECONDS", help="Wait until it serves."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a line.")
def health(address: str | None, wait_s: float, as_json: bool) -> int:
    """Ask whether a server serves: exit code 0 if so, 1 if not. Needs no token.

    A server does not serve while it loads its stores, nor once it has been told to shut down.
    """
    asked = address or ClientConfig.from_env().address
    deadline_s = time.monotonic() + wait_s
    while True:
        status, reason = check(asked, timeout_s=CHECK_TIMEOUT_S)
        if status == SERVING or time.monotonic() + POLL_INTERVAL_S > deadline_s:
            break
        time.sleep(POLL_INTERVAL_S)
    facts: dict[str, Any] = {"address": asked, "status": status, "reason": reason}
    if as_json:
        print_json(facts)
    else:
        click.echo(to_one_line(f"{asked} {status}" + (f": {reason}" if reason else "")))
    return 0 if status == SERVING else 1


def check(address: str, *, timeout_s: float) -> tuple[str, str]:
    """Checks once; of several servers all.

    Returns:
        ``SERVING``, ``NOT_SERVING`` or ``UNREACHABLE``, and the reason for the last; of several the first that is not
        ``SERVING``.
    """
    if is_of_cluster(address):
        try:
            servers = read_membership(address)
            found = [check(servers.find(server), timeout_s=timeout_s) for server in range(servers.num_servers)]
        except TDServeError as error:
            return "UNREACHABLE", str(error)
        return next((each for each in found if each[0] != SERVING), found[0])
    try:
        return (SERVING if check_health(address, timeout_s=timeout_s) else "NOT_SERVING"), ""
    except TDServeError as error:
        return "UNREACHABLE", str(error)
