from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.cli.trying.demo import derive_index, make_server_config


@pytest.mark.parametrize(
    ("address", "environ", "expected"),
    [
        (None, {}, ("127.0.0.1", 7707)),
        ("localhost:1", {}, ("localhost", 1)),
        ("server:1", {}, ("0.0.0.0", 1)),
        ("server", {}, ("0.0.0.0", 7707)),
        ("server:1", {"TDSERVE_HOST": "127.0.0.1", "TDSERVE_PORT": "2"}, ("127.0.0.1", 2)),
    ],
)
def test_settings_when_an_address_is_advertised_then_it_listens_there_unless_variables_set_another(
    address: str | None, environ: dict[str, str], expected: tuple[str, int]
) -> None:
    found = make_server_config(address, Path("r"), environ)
    assert (found.host, found.port) == expected


def test_settings_when_no_root_is_given_then_the_variable() -> None:
    assert make_server_config(None, None, {"TDSERVE_ROOT": "/data"}).root == "/data"
    with pytest.raises(InvalidRequestError, match="TDSERVE_ROOT"):
        make_server_config(None, None, {})


def test_settings_when_others_could_reach_it_without_a_token_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TDSERVE_TOKEN_FILE", raising=False)
    with pytest.raises(InvalidRequestError, match="reachable by others"):
        make_server_config("server:7707", tmp_path / "root").validate()


@pytest.mark.parametrize(
    ("hostname", "index"),
    [("actor-3", 3), ("demo_actor_12", 12), ("myhost", 0), ("node7", 0), ("00000000002a", 42), ("3f2a9c81b2c4", 1924)],
)
def test_index_of_host_when_it_ends_in_a_number_or_is_a_container_then_that(hostname: str, index: int) -> None:
    assert derive_index(hostname) == index
