"""The observer's application: its routes, behind the token, with the headers that every answer has.

A file of routes has a function that takes the snapshots and returns a list of routes; ``make_app`` has a line for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware

from tdserve.observer.access import Access, make_login_routes
from tdserve.observer.metrics_routes import make_metrics_routes
from tdserve.observer.pages.page_routes import make_page_routes
from tdserve.observer.pages.row_preview import RowPreviews
from tdserve.observer.security_headers import SecurityHeaders
from tdserve.observer.snapshots import Snapshots


def make_app(
    snapshots: Snapshots, *, token: str | None, hosts: Sequence[str] = (), previews: RowPreviews | None = None
) -> Starlette:
    """Returns the application.

    Args:
        snapshots: The figures.
        token: What a caller must have; None for nothing.
        hosts: Names by which a browser may call it when there is no token, besides addresses and ``localhost``.
        previews: Reads rows of stores; None: they are not shown.
    """
    routes = [
        *make_metrics_routes(snapshots),
        *make_login_routes(token),
        *make_page_routes(snapshots, previews, has_login=token is not None),
    ]
    middleware = [Middleware(SecurityHeaders), Middleware(Access, token=token, hosts=hosts)]
    return Starlette(routes=routes, middleware=middleware)
