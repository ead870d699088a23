"""tdserve/cli/shell/advice.py: what errors advise, for a shell."""

from __future__ import annotations

import pytest

from tdserve.base.errors import (
    ConnectError,
    InvalidRequestError,
    KeyNotFoundError,
    StoreExistsError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.cli.shell.advice import advise_shell


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (StoreNotFoundError(name="a"), "`tdserve ls` lists the stores"),
        (KeyNotFoundError(store="my store", key="x"), "`tdserve keys my store` lists its keys"),
        (StoreExistsError(name="a"), "delete it (`tdserve rm`), or choose another name"),
    ],
)
def test_error_when_it_advises_a_call_then_a_shell_reads_the_command(error: TDServeError, advice: str) -> None:
    shown = advise_shell(str(error))
    assert advice in shown
    assert "client." not in shown
    assert "exists_ok" not in shown


@pytest.mark.parametrize(
    ("advice", "for_a_shell"),
    [
        ("pass tls=tdserve.TLS(ca=), or set TDSERVE_TLS_CA", "asks: set TDSERVE_TLS_CA"),
        ("pass tls=tdserve.TLS(ca=, cert=, key=), or set TDSERVE_TLS_CA, X", "asks: set TDSERVE_TLS_CA, X"),
    ],
)
def test_error_when_it_asks_for_tls_then_a_shell_reads_the_variables(advice: str, for_a_shell: str) -> None:
    shown = advise_shell(str(ConnectError(address="a:1", reason=f"the server asks: {advice}")))
    assert shown.endswith(for_a_shell)


def test_error_when_it_names_an_option_and_an_argument_then_a_shell_reads_the_option() -> None:
    error = InvalidRequestError(
        argument="key", reason="choose others (--key, keys=), or none (--no-rows, has_rows=False)"
    )
    assert advise_shell(str(error)).endswith("choose others (--key), or none (--no-rows)")


def test_error_when_it_advises_nothing_then_stays_as_it_is() -> None:
    error = InvalidRequestError(argument="num_rows", reason="it is 0")
    assert advise_shell(str(error)) == str(error)
