"""``tdserve guide [TOPIC]``: the guide that comes with the package, in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.resources import files

import click
from rich.console import Console

from tdserve.cli.screen.render import print_json, print_table

MAX_COLUMNS = 120
"""Longer lines are hard to read, however wide the terminal is."""


@click.command()
@click.argument("topic", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with the text as Markdown.")
def guide(topic: str | None, as_json: bool) -> None:
    """Show the guide to TOPIC, or list the topics."""
    pages = dict(_read_pages())
    if topic is None and as_json:
        print_json([{"topic": name, "about": _find_summary(page)} for name, page in pages.items()])
    elif topic in pages and as_json:
        print_json({"topic": topic, "about": _find_summary(pages[topic]), "text": pages[topic]})
    elif topic is None:
        print_table(("topic", "about"), [(name, _find_summary(page)) for name, page in pages.items()])
    elif topic in pages:
        from rich.markdown import Markdown  # a parser that no other command needs

        console = Console()
        console.width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
        with console.capture() as shown:
            console.print(Markdown(pages[topic], hyperlinks=False))  # relative links lead nowhere from a terminal
        # each line is padded to the width; all are written at once, because `head -1` ends after the first
        click.echo("\n".join(line.rstrip() for line in shown.get().splitlines()))
    else:
        names = _find_near(topic, pages) if topic else []
        raise click.BadParameter(f"no topic {topic!r}; choose from {', '.join(names or pages)}", param_hint="TOPIC")


def _find_near(topic: str, pages: Mapping[str, str]) -> list[str]:
    """Returns the topics with such a heading; without one, those with such a name."""
    heading = re.compile(rf"^#+ .*\b{re.escape(topic)}\b", re.MULTILINE | re.IGNORECASE)
    headed = [name for name, page in pages.items() if heading.search(page)]
    return headed or [name for name in pages if topic in name] or get_close_matches(topic, pages)


def _read_pages() -> Iterator[tuple[str, str]]:
    """Yields every topic and its page, sorted."""
    folder = files("tdserve").joinpath("guide")
    for page in sorted(folder.iterdir(), key=lambda file: file.name):
        name, dot, kind = page.name.rpartition(".")
        if (dot, kind) == (".", "md"):
            yield name, page.read_text(encoding="utf-8")


def _find_summary(page: str) -> str:
    """Returns the paragraph below the title, which is one sentence."""
    return " ".join(page.split("\n\n")[1].split())
