"""Warnings of the client in a command."""

from __future__ import annotations

import logging

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.cli.shell.held_warnings import hold_warnings, show_warnings

log = logging.getLogger("tdserve.client")


def fail_after_a_warning() -> None:
    """What a command does whose server is lost."""
    with hold_warnings():
        log.warning("server 1 does not answer")
        raise InvalidRequestError(argument="x", reason="it is 0")


def test_warnings_when_the_command_answers_then_each_is_shown_once_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    with hold_warnings():
        log.warning("server %d\ndoes not answer", 1)
        log.warning("server %d\ndoes not answer", 1)
        log.info("nothing that matters")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "tdserve: server 1 does not answer\n"


def test_warnings_when_the_command_fails_then_only_its_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError):
        fail_after_a_warning()
    assert capsys.readouterr().err == ""


def test_warnings_when_the_command_goes_on_then_each_is_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with hold_warnings():
        log.warning("first")
        show_warnings()
        assert capsys.readouterr().err == "tdserve: first\n"
        log.warning("second")
        assert capsys.readouterr().err == "tdserve: second\n"
    assert capsys.readouterr().err == ""
