"""Checks of single settings; each raises InvalidRequestError with the setting's name."""

from __future__ import annotations

import ipaddress
import math

from tdserve.base.addresses import parse_address
from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import to_integer


def check_host(argument: str, host: object) -> None:
    """Raises for what is not a host to listen on, without its port."""
    if not host:
        raise InvalidRequestError(argument=argument, reason="is empty; 0.0.0.0 listens on every interface")
    if not isinstance(host, str):
        raise InvalidRequestError(argument=argument, reason=f"{host!r} is not a str")
    if parse_address(argument, host)[1] is not None:
        port = argument.replace("host", "port")
        reason = f"{host!r} has a port; give it as {port}= (--{port.replace('_', '-')})"
        raise InvalidRequestError(argument=argument, reason=reason)


def check_loopback(argument: str, host: str) -> None:
    """Raises for a host at which others can reach this machine."""
    if not is_loopback(host):
        remedy = "pass token_file= (--token-file), tokens_file= (--tokens) or insecure=True (--insecure)"
        raise InvalidRequestError(argument=argument, reason=f"{host!r} is reachable by others: {remedy}")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a host name may resolve to anything


def check_int(name: str, value: int, *, low: int, high: int) -> None:
    """Raises for what is not an integer within these bounds."""
    if to_integer(value) is None or not low <= value <= high:
        raise InvalidRequestError(argument=name, reason=f"{value!r} is not an integer from {low} to {high}")


def check_umask(name: str, value: int) -> None:
    """Raises for what is not a mask of the permissions of files; it is shown as shells write one."""
    if to_integer(value) is None or not 0 <= value <= 0o777:
        shown = repr(value) if to_integer(value) is None else f"{value:03o}"
        raise InvalidRequestError(argument=name, reason=f"{shown} is not an octal mask from 000 to 777")


def check_seconds(name: str, value: float, *, above: float = -1.0) -> None:
    """Raises for what is not a number of seconds above this one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidRequestError(argument=name, reason=f"{value!r} is not a number of seconds, 0 or more")
    if value <= above:
        raise InvalidRequestError(argument=name, reason=f"{value!r} is not more than {above:g} s")


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises InvalidRequestError if ``value`` is not one of ``choices``."""
    if value not in choices:
        reason = f"it must be one of {', '.join(choices)}, got {value!r}"
        raise InvalidRequestError(argument=argument, reason=reason)


def check_url(argument: str, url: object) -> None:
    """Raises for what is not a URL of HTTP."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        reason = f"{url!r} is not a URL such as http://127.0.0.1:4318"
        raise InvalidRequestError(argument=argument, reason=reason)
