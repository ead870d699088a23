"""Metrics and pages of a server whose tokens have roles: each caller sees what its token may see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, Request, build_opener

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.test_observer import fetch, find_status
from tests.integration.token_files import TIMEOUT_S, TokenFile
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])


class Observed:
    """A server with an observer and two tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokens = TokenFile(folder / "tokens.json")
        self.operator = self.tokens.add("operator", "admin")
        self.reader = self.tokens.add("reader", "read", stores=["open-*"])
        self.server = tdserve.Server(folder / "root", metrics_port=0, tokens_file=str(self.tokens.path)).start()
        with self.server.client(token=self.operator, timeout_s=TIMEOUT_S) as client:
            self.url = f"http://{client.stats()['observer']}"
            for name in ("open-table", "hidden-table"):
                client.create_replay(name, ROW, 100).extend(ROW.expand(8).clone())

    def fetch(self, path: str, token: str) -> str:
        """Returns what a token sees."""
        return fetch(f"{self.url}{path}", Authorization=f"Bearer {token}").decode()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A server with an observer."""
    made = Observed(tmp_path_factory.mktemp("observed"))
    yield made
    made.server.shutdown()


@pytest.mark.slow
def test_metrics_when_a_token_has_some_stores_then_only_these_and_nothing_of_the_server(observed: Observed) -> None:
    def has_both() -> str | None:
        found = observed.fetch("/metrics", observed.operator)
        return found if "open-table" in found and "hidden-table" in found else None

    whole = wait_for(has_both, "metrics of both stores")
    assert 'tdserve_process_resident_memory_bytes{process="control"}' in whole
    some = observed.fetch("/metrics", observed.reader)
    assert 'store="open-table"' in some
    assert "hidden" not in some
    assert 'process="control"' not in some
    assert "tdserve_up 1.0" in some


@pytest.mark.slow
def test_pages_when_a_token_has_some_stores_then_others_are_not_shown(observed: Observed) -> None:
    for path in ("/", "/stores", "/sessions", "/weights", "/live.json"):
        assert "hidden" not in observed.fetch(path, observed.reader), path
    assert "hidden-table" in observed.fetch("/stores", observed.operator)
    assert "open-table" in observed.fetch("/store?name=open-table", observed.reader)
    assert "open-table" in observed.fetch("/rows?name=open-table", observed.reader)
    header = {"Authorization": f"Bearer {observed.reader}"}
    for name in ("hidden-table", "nowhere"):
        assert find_status(f"{observed.url}/store?name={name}", **header) == 403
        assert find_status(f"{observed.url}/rows?name={name}", **header) == 404


def test_call_when_its_token_is_wrong_then_refused_and_health_needs_none(observed: Observed) -> None:
    assert find_status(f"{observed.url}/metrics") == 401
    for wrong in ("wrong", "reader.wrong", f"{observed.reader}x", "é"):
        assert find_status(f"{observed.url}/metrics", Authorization=f"Bearer {wrong}") == 401
    assert fetch(f"{observed.url}/health") == b"ok\n"


class _KeepRedirect(HTTPRedirectHandler):
    """Follows none, so that a test sees the cookie."""

    def redirect_request(self, *_: object) -> None:
        return None


def sign_in(url: str, token: str) -> str:
    """Signs in as a browser does; returns the cookie."""
    request = Request(f"{url}/login", data=urlencode({"token": token}).encode(), method="POST")
    with pytest.raises(HTTPError) as caught:
        build_opener(_KeepRedirect).open(request, timeout=TIMEOUT_S)
    caught.value.close()
    assert caught.value.code == 303
    found = re.match(r"[^;]+", caught.value.headers["set-cookie"])
    assert found is not None
    return found[0]


@pytest.mark.slow
def test_login_when_its_token_is_revoked_then_ends(observed: Observed) -> None:
    token = observed.tokens.add("guest", "read", stores=["open-*"])

    def is_accepted() -> bool:
        try:
            observed.fetch("/metrics", token)
        except HTTPError as error:
            error.close()
            return False
        return True

    wait_for(is_accepted, "the new token")
    cookie = sign_in(observed.url, token)
    assert token.partition(".")[2] not in cookie
    shown = fetch(f"{observed.url}/stores", Cookie=cookie).decode()
    assert "open-table" in shown
    assert "hidden" not in shown
    observed.tokens.remove("guest")
    wait_for(lambda: not is_accepted(), "the end of the token")
    assert find_status(f"{observed.url}/stores", Cookie=cookie) == 401
