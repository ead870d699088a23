"""``tdserve health``: a health check of a server; the answer is the exit code."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import click

from tdserve.base.config import ClientConfig
from tdserve.base.errors import TDServeError
from tdserve.cli.screen.render import print_json, to_one_line
from tdserve.cli.shell.advice import advise_shell
from tdserve.cli.shell.number_types import TimeRange
from tdserve.client.cluster.servers.membership import is_of_cluster, read_membership
from tdserve.control.connection import check_health

CHECK_TIMEOUT_S = 3.0
"""Timeout of one check: orchestrators allow a few seconds, including the start of Python."""

POLL_INTERVAL_S = 0.2
"""Pause between two checks of a command that waits."""

SERVING = "SERVING"


@click.command()
@click.option("--address", metavar="HOST:PORT", help="The server, or HOST:PORT,HOST:PORT; else $TDSERVE_ADDRESS.")
@click.option("--wait", "wait_s", type=TimeRange(min=0.0), default=0.0, metavar="SECONDS", help="Wait until it serves.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a line.")
def health(address: str | None, wait_s: float, as_json: bool) -> int:
    """Ask whether a server serves: exit code 0 if so, 1 if not. Needs no token.

    Of several servers there is a line for each, and code 0 if all serve. A server does not serve while it loads its
    stores, while its root folder is gone, nor once it has been told to shut down.
    """
    asked = address or ClientConfig.from_env().address
    deadline_s = time.monotonic() + wait_s
    while True:
        checks = check(asked)
        is_serving = all(each.status == SERVING for each in checks)
        if is_serving or time.monotonic() + POLL_INTERVAL_S > deadline_s:
            break
        time.sleep(POLL_INTERVAL_S)
    if as_json:
        worst = next((each for each in checks if each.status != SERVING), checks[0])
        several = {"servers": [each._asdict() for each in checks]} if is_of_cluster(asked) else {}
        print_json({"address": asked, "status": worst.status, "reason": worst.reason, **several})
    else:
        for each in checks:
            click.echo(to_one_line(f"{each.address} {each.status}" + (f": {each.reason}" if each.reason else "")))
    return 0 if is_serving else 1


class Check(NamedTuple):
    """What a check has found.

    Attributes:
        address: Address of the server, or of the cluster if its servers are not known.
        status: ``SERVING``, ``NOT_SERVING`` or ``UNREACHABLE``.
        reason: For the last.
    """

    address: str
    status: str
    reason: str = ""


def check(address: str, *, timeout_s: float = CHECK_TIMEOUT_S) -> list[Check]:
    """Checks a server once, or each of a cluster at the same time, in their order."""
    if not is_of_cluster(address):
        return [_check_server(address, timeout_s)]
    try:
        servers = read_membership(address)
    except TDServeError as error:
        return [Check(address, "UNREACHABLE", str(error))]

    def check_one(server: int) -> Check:
        try:
            found = servers.find(server)
        except TDServeError as error:
            return Check(f"server {server}", "UNREACHABLE", str(error))
        return _check_server(found, timeout_s)

    with ThreadPoolExecutor(servers.num_servers) as threads:
        return list(threads.map(check_one, range(servers.num_servers)))


def _check_server(address: str, timeout_s: float) -> Check:
    try:
        tls = ClientConfig.from_env().find_tls()
        return Check(address, SERVING if check_health(address, timeout_s=timeout_s, tls=tls) else "NOT_SERVING")
    except TDServeError as error:
        return Check(address, "UNREACHABLE", advise_shell(str(error)))
