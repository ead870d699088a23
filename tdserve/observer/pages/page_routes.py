"""The pages' routes: what a page needs is asked for here, and how it looks stands in ``templates/``."""

from __future__ import annotations

import asyncio
import math
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tdserve.base.errors import InvalidRequestError, PermissionDeniedError, TDServeError
from tdserve.cli.screen.render import escape_unprintable, format_nbytes
from tdserve.messages.store_kinds import name_counted_kind
from tdserve.observer.access import STYLE, get_viewer
from tdserve.observer.pages.guide_pages import find_topics, render_topic
from tdserve.observer.pages.page_figures import (
    ShownRates,
    count_live,
    describe_process,
    describe_session,
    describe_store,
    explain_store,
    summarise_calls,
)

PAGE_STORES = 100

STATIC_TYPES = {"observer.css": "text/css", "observer.js": "text/javascript", "icon.svg": "image/svg+xml"}


def make_page_routes(*, has_login: bool) -> list[BaseRoute]:
    """Returns the routes of all pages.

    Args:
        has_login: Whether there is a viewer to sign out.
    """
    pages = Pages(has_login=has_login)
    return [
        Route("/", pages.show_overview),
        Route("/live.json", pages.show_live),
        Route("/stores", pages.show_stores),
        Route("/store", pages.show_store),
        Route("/rows", pages.show_rows),
        Route("/image", pages.show_image),
        Route("/weights", pages.show_weights),
        Route("/sessions", pages.show_sessions),
        Route("/guide", pages.show_guide),
        Route("/guide/{topic}", pages.show_topic),
        Route("/static/{file}", show_static),
        Route("/{path:path}", pages.show_missing),
    ]


class Pages:
    """Answers for pages; the argument is that of ``make_page_routes``."""

    def __init__(self, *, has_login: bool) -> None:
        self._rates = ShownRates()
        self._templates = Environment(
            loader=PackageLoader("tdserve.observer.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"has_login": has_login, "link": make_link, "style": STYLE}
        self._templates.filters |= {
            "nbytes": format_nbytes,
            "text": escape_unprintable,
            "seconds": format_seconds,
            "count": _format_count,
        }

    def _render(self, template: str, status: int = 200, /, **content: Any) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(**content), status)

    def _fail(self, reason: str, status: int = 503, title: str = "The server does not answer") -> Response:
        return self._render("failure.html", status, page="", title=title, reason=reason)

    async def show_missing(self, request: Request) -> Response:
        """Says that there is no such page, with the links to those that there are."""
        return self._fail("There is no page at this address.", 404, "No such page")

    async def show_overview(self, request: Request) -> Response:
        """Shows the whole server."""
        snapshot = await get_viewer(request).snapshots.get()
        figures = snapshot.figures
        if figures is None:
            return self._fail(snapshot.reason)
        kinds = [(name_counted_kind(each), each.num_stores) for each in figures.kinds]
        return self._render(
            "overview.html",
            page="overview",
            title="Overview",
            figures=figures,
            kinds=kinds,
            num_stores=sum(num for _, num in kinds),
            processes=[describe_process(each, figures) for each in figures.processes],
            calls=summarise_calls(figures.calls),
        )

    async def show_live(self, request: Request) -> Response:
        """Returns counts for the charts, which show their differences."""
        snapshot = await get_viewer(request).snapshots.get()
        if snapshot.figures is None:
            return JSONResponse({"reason": snapshot.reason}, 503)
        return JSONResponse(count_live(snapshot.figures))

    async def show_stores(self, request: Request) -> Response:
        """Shows a page of the stores whose names contain a text."""
        sought = request.query_params.get("filter", "")
        snapshots = get_viewer(request).snapshots
        try:
            names = await snapshots.list_names()
            found = [name for name in names if sought.lower() in name.lower()]
            num_pages = max(math.ceil(len(found) / PAGE_STORES), 1)
            number = min(max(_parse_number(request.query_params.get("page", "1")), 1), num_pages)
            shown = found[(number - 1) * PAGE_STORES : number * PAGE_STORES]
            figures = {each.description.name: each for each in await snapshots.observe_stores(shown)}
        except TDServeError as error:
            return self._fail(str(error))
        now_s = asyncio.get_running_loop().time()
        stores = [describe_store(figures[name], self._rates, now_s) for name in shown if name in figures]
        return self._render(
            "stores.html",
            page="stores",
            title="Stores",
            stores=stores,
            sought=sought,
            num_found=len(found),
            num_all=len(names),
            number=number,
            num_pages=num_pages,
        )

    async def show_store(self, request: Request) -> Response:
        """Shows the figures and the structure of a store."""
        name, viewer = request.query_params.get("name", ""), get_viewer(request)
        try:
            described = await viewer.snapshots.describe_store(name)
            found = await viewer.snapshots.observe_stores([name]) if described is not None else []
        except InvalidRequestError as error:
            return self._fail(str(error), 400, "No such store")
        except PermissionDeniedError as error:
            return self._fail(str(error), 403, "Not open to this token")
        except TDServeError as error:
            return self._fail(str(error))
        if described is None or not found:
            return self._fail(f"There is no store {escape_unprintable(name)!r}.", 404, "No such store")
        now_s = asyncio.get_running_loop().time()
        return self._render(
            "store.html",
            page="stores",
            title=escape_unprintable(name),
            store=describe_store(found[0], self._rates, now_s),
            figures=found[0],
            facts=explain_store(described),
            has_rows=viewer.previews is not None,
        )

    async def show_rows(self, request: Request) -> Response:
        """Shows the first rows of a store."""
        name, previews = request.query_params.get("name", ""), get_viewer(request).previews
        if previews is None:
            return self._fail("This observer shows no rows.", 404, "No rows")
        try:
            preview = await previews.read(name)
        except TDServeError as error:
            return self._fail(str(error), 404, "No rows")
        return self._render(
            "rows.html", page="stores", title=f"Rows of {escape_unprintable(name)}", name=name, preview=preview
        )

    async def show_image(self, request: Request) -> Response:
        """Returns an image of rows that were shown recently."""
        previews = get_viewer(request).previews
        image = previews and previews.find_image(request.query_params.get("id", ""))
        return Response(image, media_type="image/png") if image else Response(status_code=404)

    async def show_weights(self, request: Request) -> Response:
        """Shows weights, who reads them, and how far behind."""
        snapshot = await get_viewer(request).snapshots.get()
        if snapshot.figures is None:
            return self._fail(snapshot.reason)
        kept = [each for each in snapshot.figures.stores if each.num_versions]
        return self._render("weights.html", page="weights", title="Weights", stores=kept)

    async def show_sessions(self, request: Request) -> Response:
        """Shows the open sessions."""
        snapshot = await get_viewer(request).snapshots.get()
        if snapshot.figures is None:
            return self._fail(snapshot.reason)
        now_s = snapshot.taken_s
        uptime_s = snapshot.figures.uptime_s
        sessions = [describe_session(each, self._rates, now_s, uptime_s=uptime_s) for each in snapshot.figures.sessions]
        return self._render(
            "sessions.html",
            page="sessions",
            title="Sessions",
            sessions=sessions,
            num_sessions=snapshot.figures.num_sessions,
        )

    async def show_guide(self, request: Request) -> Response:
        """Lists the topics of the guide."""
        return self._render("guide.html", page="guide", title="Guide", topics=find_topics(), content=None)

    async def show_topic(self, request: Request) -> Response:
        """Shows a page of the guide, or one of its pictures."""
        topic = request.path_params["topic"]
        found = render_topic(topic)
        if found is None:
            return self._fail(f"The guide has no page {escape_unprintable(topic)!r}.", 404, "No such page")
        if isinstance(found, bytes):
            return Response(found, media_type="image/png", headers={"cache-control": "private, max-age=3600"})
        return self._render("guide.html", page="guide", title=topic, topics=find_topics(), content=found)


async def show_static(request: Request) -> Response:
    """Returns the style or the script."""
    file = request.path_params["file"]
    if file not in STATIC_TYPES:
        return Response(status_code=404)
    content = files("tdserve.observer.pages").joinpath("static").joinpath(file).read_bytes()
    return Response(content, media_type=STATIC_TYPES[file], headers={"cache-control": "private, max-age=3600"})


def make_link(path: str, **query: object) -> str:
    """Returns a link with a query, whose values may be any text."""
    return f"{path}?{urlencode(query, errors='replace')}"


def format_seconds(seconds: float) -> str:
    """Shows a time with a unit that suits it."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def _format_count(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _parse_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1
