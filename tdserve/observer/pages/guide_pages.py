"""The guide as pages: its files, rendered without any markup of their own."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

_NAME = re.compile(r"[a-z0-9-]+")


@cache
def find_topics() -> tuple[tuple[str, str], ...]:
    """Returns every topic with its summary, sorted."""
    folder = files("tdserve").joinpath("guide")
    pages = sorted((page for page in folder.iterdir() if page.name.endswith(".md")), key=lambda page: page.name)
    texts = {page.name.removesuffix(".md"): page.read_text(encoding="utf-8") for page in pages}
    return tuple((name, " ".join(text.split("\n\n")[1].split())) for name, text in texts.items())


@cache
def render_topic(topic: str) -> Markup | bytes | None:
    """Returns a page, or a picture of one; None if there is none of the name."""
    name, dot, kind = topic.partition(".")
    page = files("tdserve").joinpath("guide").joinpath(topic if dot else f"{topic}.md")
    if not _NAME.fullmatch(name) or kind not in ("", "png") or (dot and not kind) or not page.is_file():
        return None
    if kind == "png":
        return page.read_bytes()
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(page.read_text(encoding="utf-8"))
    for token in tokens:
        for child in token.children or ():
            _mend_link(child)
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # noqa: S704 (no HTML of the page passes)


def _mend_link(token: Token) -> None:
    """Leads links to the observer's own pages; those to files that it does not have lead nowhere."""
    if token.type == "image":
        token.attrSet("src", f"/guide/{token.attrGet('src')}")
        token.attrSet("loading", "lazy")
    target = token.attrGet("href") if token.type == "link_open" else None
    if not isinstance(target, str) or target.startswith(("https://", "#")):
        return
    page, _, heading = target.partition("#")
    if page.endswith(".md") and _NAME.fullmatch(page.removesuffix(".md")):
        token.attrSet("href", f"/guide/{page.removesuffix('.md')}" + (f"#{heading}" if heading else ""))
    else:
        token.attrs.pop("href")
