"""Who may see something: a viewer with a token of the server, as bearer, as password or as the cookie of a login."""

from __future__ import annotations

import base64
import ipaddress
import logging
from collections.abc import Sequence
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tdserve.base.errors import TDServeError
from tdserve.base.logs import SparseLog
from tdserve.observer.viewers import Viewer, Viewers

COOKIE = "tdserve_session"

_VIEWER = "tdserve.viewer"
"""Key of a scope."""

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
    """Refuses every call without a token, before anything else is done; where there are none, calls by a strange name.

    The viewer of an accepted call is in its scope: see ``get_viewer``.

    Without a token, a page of another site could make its own name resolve to this machine and then read what its
    visitor may: so a call must name an address, ``localhost`` or one of ``hosts``.

    Args:
        app: The application.
        viewers: Finds the viewer of a token.
        hosts: Names by which it may be called without a token.
    """

    def __init__(self, app: ASGIApp, *, viewers: Viewers, hosts: Sequence[str]) -> None:
        self._app = app
        self._viewers = viewers
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._refusals = SparseLog(_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = HTTPConnection(scope)
        refusal: Response | None = None
        scope[_VIEWER] = self._viewers.own
        if not self._viewers.asks_token:
            if not self._is_known(connection.headers.get("host", "")):
                refusal = PlainTextResponse("this name is not the observer's; call it by its address\n", 421)
        elif scope["path"] not in OPEN_PATHS:
            refusal = await self._admit(connection, scope)
        await (refusal or self._app)(scope, receive, send)

    async def _admit(self, connection: HTTPConnection, scope: Scope) -> Response | None:
        """Puts the viewer of a call into its scope; returns the answer to one that has none."""
        token = find_token(connection.headers)
        if token is None:
            token = self._viewers.find_login(connection.cookies.get(COOKIE, ""))
        try:
            viewer = await self._viewers.find(token) if token else None
        except TDServeError:
            return PlainTextResponse("the server does not answer, so the token cannot be checked\n", 503)
        if viewer is None:
            return self._refuse(connection)
        scope[_VIEWER] = viewer
        return None

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


def get_viewer(request: HTTPConnection) -> Viewer:
    """Returns the viewer of a call that was accepted."""
    viewer: Viewer = request.scope[_VIEWER]
    return viewer


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


def make_login_routes(viewers: Viewers) -> list[Route]:
    """Returns the routes by which a person signs in and out; none if the server has no token."""
    if not viewers.asks_token:
        return []

    async def show(request: Request) -> Response:
        return _show_form(request)

    async def sign_in(request: Request) -> Response:
        given = parse_qs(await _read_body(request)).get("token", [""])[0].strip()
        try:
            viewer = await viewers.find(given) if given else None
        except TDServeError:
            return _show_form(request, message='<p role="alert">The server does not answer.</p>', status=503)
        if viewer is None:
            _log.warning("a login from %s was refused", _name_peer(request))
            return _show_form(request, message='<p role="alert">This is not the token.</p>', status=401)
        answer = RedirectResponse(_find_target(request), 303)
        cookie, is_secure = viewers.remember(given), request.url.scheme == "https"
        answer.set_cookie(COOKIE, cookie, max_age=COOKIE_AGE_S, httponly=True, samesite="strict", secure=is_secure)
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


def _name_peer(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client is not None else "an unknown address"
