"""The observer's application: its routes, behind the token, with the headers that every answer has.

A file of routes has a function that returns a list of routes; ``make_app`` has a line for each. What a route shows
comes from the viewer of its call (``get_viewer``), and so from what the server answers to the caller's token.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware

from tdserve.observer.access import Access, make_login_routes
from tdserve.observer.metrics_routes import make_metrics_routes
from tdserve.observer.pages.page_routes import make_page_routes
from tdserve.observer.security_headers import SecurityHeaders
from tdserve.observer.viewers import Viewers


def make_app(viewers: Viewers, *, hosts: Sequence[str] = ()) -> Starlette:
    """Returns the application.

    Args:
        viewers: Finds what a caller is shown.
        hosts: Names by which a browser may call it when there is no token, besides addresses and ``localhost``.
    """
    routes = [
        *make_metrics_routes(),
        *make_login_routes(viewers),
        *make_page_routes(has_login=viewers.asks_token),
    ]
    middleware = [Middleware(SecurityHeaders), Middleware(Access, viewers=viewers, hosts=hosts)]
    return Starlette(routes=routes, middleware=middleware)
