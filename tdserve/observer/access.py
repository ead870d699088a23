"""Who may see something: whoever has the server's token, as bearer, as password or as the cookie of a login."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Sequence
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tdserve.base.logs import SparseLog

COOKIE = "tdserve_session"

COOKIE_AGE_S = 30 * 24 * 3600
"""Longest life of a login, seconds."""

LOGIN, HEALTH, STYLE = "/login", "/health", "/static/observer.css"

OPEN_PATHS = (LOGIN, HEALTH, STYLE)
"""What is answered without a token: nothing of it comes from the server's stores."""

MAX_FORM_BYTES = 8_192

_log = logging.getLogger("tdserve.observer")

_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>tdserve: sign in</title><link rel="stylesheet" href="/static/observer.css"></head>
<body class="login"><main><h1>tdserve</h1>{message}
<form method="post" action="/login{target}"><label for="token">Token of the server</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Sign in</button></form></main></body></html>"""


class Access:
    """Refuses every call without the token, before anything is done for it; without a token, calls by a strange name.

    Without a token, a page of another site could make its own name resolve to this machine and then read what its
    visitor may: so a call must name an address, ``localhost`` or one of ``hosts``.

    Args:
        app: The application.
        token: The token; None for none.
        hosts: Names by which it may be called without a token.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Sequence[str]) -> None:
        self._app = app
        self._token = token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._refusals = SparseLog(_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = HTTPConnection(scope)
        refusal: Response | None = None
        if self._token is None:
            if not self._is_known(connection.headers.get("host", "")):
                refusal = PlainTextResponse("this name is not the observer's; call it by its address\n", 421)
        elif scope["path"] not in OPEN_PATHS and not is_allowed(connection, self._token):
            refusal = self._refuse(connection)
        await (refusal or self._app)(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _refuse(self, connection: HTTPConnection) -> Response:
        self._refusals.warn(f"refused a call from {_name_peer(connection)}: its token is missing or wrong")
        if connection.scope["method"] == "GET" and "text/html" in connection.headers.get("accept", ""):
            target = f"?next={quote(connection.scope['path'], safe='')}"
            return RedirectResponse(LOGIN + target, 303)
        challenge = {"www-authenticate": 'Bearer realm="tdserve", Basic realm="tdserve", charset="UTF-8"'}
        return PlainTextResponse("the server's token is missing or wrong\n", 401, headers=challenge)


def is_allowed(connection: HTTPConnection, token: str) -> bool:
    """Returns whether a call has the token. Takes the same time however much of a wrong one is right."""
    given = find_token(connection.headers)
    if given is not None:
        return _is_equal(given, token)
    return _is_equal(connection.cookies.get(COOKIE, ""), make_cookie(token))


def find_token(headers: Headers) -> str | None:
    """Returns the token of an ``authorization``: a bearer, or the password of any user. None if it has none."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return None


def make_cookie(token: str) -> str:
    """Returns what a login leaves in a browser: it proves the token, and does not contain it."""
    return hmac.new(token.encode(), b"tdserve observer login", hashlib.sha256).hexdigest()


def make_login_routes(token: str | None) -> list[Route]:
    """Returns the routes by which a person signs in and out; none without a token."""
    if token is None:
        return []
    expected, cookie = token, make_cookie(token)

    async def show(request: Request) -> Response:
        return _show_form(request)

    async def sign_in(request: Request) -> Response:
        given = parse_qs(await _read_body(request)).get("token", [""])[0].strip()
        if not _is_equal(given, expected):
            _log.warning("a login from %s was refused", _name_peer(request))
            return _show_form(request, message='<p role="alert">This is not the token.</p>', status=401)
        answer = RedirectResponse(_find_target(request), 303)
        answer.set_cookie(
            COOKIE, cookie, max_age=COOKIE_AGE_S, httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return answer

    async def sign_out(request: Request) -> Response:
        answer = RedirectResponse(LOGIN, 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    return [
        Route(LOGIN, show, methods=["GET"]),
        Route(LOGIN, sign_in, methods=["POST"]),
        Route("/logout", sign_out, methods=["POST"]),
    ]


def _show_form(request: Request, *, message: str = "", status: int = 200) -> Response:
    target = f"?next={quote(_find_target(request), safe='')}"
    return HTMLResponse(_FORM.format(message=message, target=target), status)


def _find_target(request: Request) -> str:
    """Returns the page to show after a login: one of the observer's own."""
    target = request.query_params.get("next", "/")
    is_own = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if is_own else "/"


async def _read_body(request: Request) -> str:
    """Returns a small form; "" if it is larger, or no text."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            return ""
    return body.decode("ascii", errors="replace")


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _name_peer(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client is not None else "an unknown address"
