"""tdserve/observer/access.py and security_headers.py: who may see the pages, and what a browser may do with them."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

import pytest
from starlette.applications import Starlette

from tdserve.observer.access import COOKIE
from tdserve.observer.viewers import make_cookie
from tests.unit.observer.figures import Answer, RecordedServer, call, make_application, make_figures

TOKEN = "s3cret token"


@pytest.fixture
def guarded() -> Starlette:
    """An application behind a token."""
    return make_application(token=TOKEN)


def basic(password: str, user: str = "anybody") -> str:
    """Returns the header of a browser's own login."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.mark.parametrize(
    "path", ["/metrics", "/", "/nothing", "/static/x.js", "/health/x", "//health", "/login/../metrics"]
)
def test_call_when_it_has_no_token_then_refused_whatever_is_there(guarded: Starlette, path: str) -> None:
    answer = call(guarded, path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer ")
    assert b"tdserve_" not in answer.body


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {TOKEN}",
        f"bearer {TOKEN} ",
        basic(TOKEN),
        basic(TOKEN, user=""),
    ],
)
def test_call_when_it_has_the_token_then_answered(guarded: Starlette, header: str) -> None:
    assert call(guarded, "/metrics", authorization=header).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer ",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        TOKEN,
        f"Token {TOKEN}",
        "Basic ",
        "Basic !!!",
        basic("wrong"),
        f"Basic {base64.b64encode(TOKEN.encode()).decode()}",
        f"Basic {base64.b64encode(b'a:' + bytes([255])).decode()}",
        "Bearer \xff\xfe",
    ],
)
def test_call_when_the_token_is_wrong_then_refused(guarded: Starlette, header: str) -> None:
    assert call(guarded, "/metrics", authorization=header).status == 401


def test_call_when_refused_then_no_figures_are_asked_for() -> None:
    server = RecordedServer(make_figures())
    app = make_application(server, token=TOKEN)
    call(app, "/metrics", authorization="Bearer wrong")
    assert server.num_questions == 0


def test_health_when_asked_without_a_token_then_answers_and_shows_nothing(guarded: Starlette) -> None:
    assert call(guarded, "/health").body == b"ok\n"
    assert call(make_application(RecordedServer(None), token=TOKEN), "/health").status == 503


def sign_in(app: Starlette, token: str, target: str = "/") -> Answer:
    """Sends the form of the login."""
    return call(app, f"/login?next={quote(target, safe='')}", "POST", f"token={quote(token)}".encode())


def test_browser_when_it_has_no_login_then_sent_to_the_form_and_back(guarded: Starlette) -> None:
    sent = call(guarded, "/stores/x", accept="text/html,*/*")
    assert (sent.status, sent.headers["location"]) == (303, "/login?next=%2Fstores%2Fx")
    form = call(guarded, sent.headers["location"])
    assert (form.status, b'action="/login?next=%2Fstores%2Fx"' in form.body) == (200, True)
    answer = sign_in(guarded, TOKEN, "/stores/x")
    assert (answer.status, answer.headers["location"]) == (303, "/stores/x")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert call(guarded, "/metrics", cookie=cookie.partition(";")[0]).status == 200


def test_login_when_the_token_is_wrong_then_no_cookie(guarded: Starlette) -> None:
    for token in ("", "wrong", TOKEN + "x", "x" * 100_000):
        answer = sign_in(guarded, token)
        assert (answer.status, "set-cookie" in answer.headers) == (401, False)
        assert b"not the token" in answer.body


@pytest.mark.parametrize(
    "target",
    ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/a\r\nset-cookie: x"],
)
def test_login_when_it_would_lead_elsewhere_then_to_the_first_page(guarded: Starlette, target: str) -> None:
    assert sign_in(guarded, TOKEN, target).headers["location"] == "/"


def test_login_when_the_target_is_markup_then_it_stays_text(guarded: Starlette) -> None:
    form = call(guarded, f"/login?next={quote(chr(47) + '<script>' + chr(34) + '>')}").body.decode()
    assert "<script>" not in form
    assert len(re.findall("<form", form)) == 1


def test_cookie_when_of_another_token_then_refused(guarded: Starlette) -> None:
    assert call(guarded, "/metrics", cookie=f"{COOKIE}={make_cookie('other')}").status == 401
    assert call(guarded, "/metrics", cookie=f"{COOKIE}={make_cookie(TOKEN)}").status == 200
    assert call(guarded, "/logout", "POST", cookie=f"{COOKIE}={make_cookie(TOKEN)}").status == 303


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost", "LOCALHOST:80", "[::1]:9", "10.1.2.3", "here.example:9"])
def test_host_when_there_is_no_token_then_addresses_and_own_names_are_answered(host: str) -> None:
    assert call(make_application(hosts=("here.example",)), "/health", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9", "127.0.0.1.evil.example", "", "localhost.evil", "[x]"]
)
def test_host_when_a_stranger_s_name_leads_here_then_refused(host: str) -> None:
    assert call(make_application(), "/health", host=host).status == 421


@pytest.mark.parametrize("path", ["/metrics", "/health", "/nothing", "/login"])
def test_answers_when_given_then_each_has_the_strict_headers(path: str) -> None:
    for app in (make_application(), make_application(token=TOKEN)):
        headers = call(app, path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
