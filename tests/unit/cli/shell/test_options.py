"""tdserve/cli/shell/options.py: where a command finds its server, and how it connects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.cli.shell.options import Endpoint, make_endpoint, open_catalog_client
from tests.unit.control.serving import Answering, serving


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment variables without any of tdserve's."""
    for name in [name for name in os.environ if name.startswith("TDSERVE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_endpoint_when_everything_is_a_variable_then_found(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from the file\n")
    variables.setenv("TDSERVE_ADDRESS", "a:1")
    variables.setenv("TDSERVE_TOKEN_FILE", str(tmp_path / "token"))
    variables.setenv("TDSERVE_TRANSPORT", "shm")
    variables.setenv("TDSERVE_LOCAL_ROOT", "/data")
    assert make_endpoint(None, None) == Endpoint("a:1", "from the file", "shm", None, "/data")
    variables.setenv("TDSERVE_TOKEN", "itself")
    assert make_endpoint("b:2", None)[:2] == ("b:2", "itself")
    assert make_endpoint("b:2", tmp_path / "token").token == "from the file"
    with serving(Answering(), token="itself") as address, open_catalog_client(address, None) as client:
        assert client.stats()["server_id"] == "test"


def test_endpoint_when_the_variables_file_is_missing_then_error_names_the_variable(
    variables: pytest.MonkeyPatch,
) -> None:
    variables.setenv("TDSERVE_TOKEN_FILE", "/no/such/file")
    with pytest.raises(InvalidRequestError, match="/no/such/file") as caught:
        make_endpoint(None, None)
    assert caught.value.argument == "TDSERVE_TOKEN_FILE"
