"""The pages of the application alone: their content, how long they take, and that no name or value of a store becomes
markup."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
import torch
from tensordict import TensorDict

from tdserve.observer.security_headers import POLICY
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.codec import encode
from tests.unit.observer.figures import RecordedServer, add_table, add_weights, call, make_application, make_figures

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "&lt;b&gt; &amp;",
    "right-to-left \u202e override",
    "line\nfeed \x1b[31m",
    "</title></table></main>",
    "x" * 200,
)

PATHS = ("/", "/stores", "/weights", "/sessions", "/guide", "/guide/replay", "/store?name=evil")


class MarkupFinder(HTMLParser):
    """Collects elements and attributes that could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "script" and found.get("src") != "/static/observer.js":
            self.faults.append("script")
        if tag in ("iframe", "object", "embed", "style", "base", "b"):
            self.faults.append(tag)
        self.faults += [name for name in found if name.startswith("on") or name == "style"]
        for name in ("href", "src", "action"):
            target = found.get(name)
            if target is not None:
                self.links.append(target)
                if not target.startswith(("/", "#", "https://")):
                    self.faults.append(target)


def read_page(server: RecordedServer, path: str) -> str:
    """Returns a page that is whole and harmless."""
    answer = call(make_application(server), path)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    text = answer.body.decode()
    finder = MarkupFinder()
    finder.feed(text)
    assert finder.faults == []
    assert text.rstrip().endswith("</html>")
    return text


def find_text(page: str) -> str:
    """Returns what a page shows."""
    return unescape(re.sub(r"<[^>]*>", " ", page))


@pytest.fixture
def evil() -> RecordedServer:
    """A server all of whose texts somebody hostile has chosen."""
    figures = make_figures()
    for name in EVIL:
        add_table(figures, name).waits.add(call=name)
        weights = add_weights(figures, f"weights {name}")
        weights.readers[0].host = name
        session = figures.sessions.add(degraded=[name])
        session.session.host, session.session.transport = name, name
        figures.processes.add(process=name)
        figures.calls.add(side=name, call=name, buckets=[1, 2])
        figures.transports.add(transport=name)
    spec = encode(capture(TensorDict({name: torch.zeros(2) for name in EVIL[:-1]}, [])).spec)
    for store in figures.stores:
        store.description.spec.CopyFrom(spec)
    return RecordedServer(figures, tuple(store.description.name for store in figures.stores))


def test_pages_when_all_texts_are_evil_then_they_are_text(evil: RecordedServer) -> None:
    for path in ("/", "/stores", "/weights", "/sessions"):
        page = read_page(evil, path)
        assert "49" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
    shown = find_text(read_page(evil, "/stores"))
    assert all(name in shown for name in EVIL if name.isprintable())


@pytest.mark.slow
def test_stores_when_there_are_5000_and_200_sessions_then_a_page_of_them_within_300_ms() -> None:
    figures = make_figures(5_000)
    for number in range(200):
        figures.sessions.add(num_requests=number).session.host = f"host-{number}"
    names = tuple(store.description.name for store in figures.stores)
    server = RecordedServer(figures, names)
    app = make_application(server)
    for path in ("/", "/stores", "/stores?page=50", "/stores?filter=4999", "/sessions", "/live.json"):
        took_s = []
        for _ in range(3):  # one of them may have to wait for a collection of all garbage of this process
            begun_s = time.process_time()
            assert call(app, path).status == 200
            took_s.append(time.process_time() - begun_s)
        assert min(took_s) < 0.3


@pytest.mark.slow
def test_stores_when_filtered_and_paged_then_those_of_the_page() -> None:
    figures = make_figures(250)
    server = RecordedServer(figures, tuple(store.description.name for store in figures.stores))

    def list_names(query: str) -> list[str]:
        return re.findall(r'name=(table-\d+)"', read_page(server, f"/stores{query}"))

    assert len(list_names("")) == 100
    assert list_names("?page=3") == [f"table-{number:05}" for number in range(200, 250)]
    assert list_names("?page=99") == list_names("?page=3")
    assert list_names("?page=-1") == list_names("?page=x") == list_names("")
    assert list_names("?filter=E-0024") == [f"table-{number:05}" for number in range(240, 250)]
    assert "10 of 250" in find_text(read_page(server, "/stores?filter=E-0024"))
    assert list_names("?filter=nothing") == []


def test_overview_when_shown_then_has_the_server_and_its_processes_and_calls() -> None:
    shown = " ".join(find_text(read_page(RecordedServer(make_figures(1)), "/")).split())
    assert "Up for 1 min" in shown
    assert "control 11 1.5 s" in shown
    assert re.search(r"sample control 8 1 62.5 ms", shown)


def test_live_when_asked_then_sums_that_charts_can_subtract() -> None:
    answer = call(make_application(RecordedServer(make_figures(3))), "/live.json")
    found = json.loads(answer.body)
    assert (found["requests"], found["rows_in"], found["rows_out"]) == (8, 30, 120)
    assert (found["bytes_in"], found["bytes_out"], found["cpu_s"]) == (5, 6, 1.5)


def test_weights_when_shown_then_each_reader_with_its_lag() -> None:
    figures = make_figures()
    add_weights(figures, "policy")
    shown = " ".join(find_text(read_page(RecordedServer(figures), "/weights")).split())
    assert "Version 9, published 2 s ago; 2 kept" in shown
    assert "here:77 5 7 2 4 s" in shown


@pytest.mark.parametrize("path", ["/", "/stores", "/store?name=x", "/weights", "/sessions"])
def test_page_when_the_server_is_gone_then_has_the_reason(path: str) -> None:
    answer = call(make_application(RecordedServer(None)), path)
    assert answer.status == 503
    assert b"it is gone" in answer.body


@pytest.mark.parametrize(
    "path",
    [
        f"/store?name={quote('<b>')}",
        "/store",
        "/rows?name=x",
        "/image?id=1",
        "/static/observer.py",
        "/static/..%2fpage_routes.py",
        "/guide/nothing",
        "/guide/..%2f..%2fREADME",
        "/guide/replay.md",
        "/guide/.png",
        "/stores/x",
        "/nothing",
    ],
)
def test_page_when_there_is_none_then_404_and_harmless(path: str) -> None:
    answer = call(make_application(RecordedServer(make_figures())), path)
    assert answer.status == 404
    assert b"<b>" not in answer.body


def test_page_when_its_address_is_wrong_then_links_to_those_that_are_there() -> None:
    answer = call(make_application(RecordedServer(make_figures())), "/nothing", accept="text/html")
    assert (answer.status, b"There is no page at this address" in answer.body) == (404, True)
    assert b'href="/stores"' in answer.body


@pytest.mark.parametrize("path", [*PATHS, "/live.json", "/rows?name=x", "/image?id=1", "/static/observer.js"])
def test_page_when_there_is_a_token_then_nothing_without_it(path: str) -> None:
    server = RecordedServer(make_figures())
    app = make_application(server, token="secret")
    assert call(app, path).status == 401
    assert call(app, path, accept="text/html").status == 303
    assert server.num_questions == 0
    assert b"Sign out" in call(app, "/guide", authorization="Bearer secret").body


@pytest.mark.slow
def test_guide_when_shown_then_links_lead_to_its_pages_and_code_is_text() -> None:
    server = RecordedServer(make_figures())
    topics = re.findall(r'href="/guide/([a-z0-9-]+)"', read_page(server, "/guide"))
    assert len(topics) > 15
    finder = MarkupFinder()
    for topic in topics:
        finder.feed(read_page(server, f"/guide/{topic}"))
    inner = {link.partition("#")[0] for link in finder.links if link.startswith("/guide/")}
    assert inner
    assert {link for link in inner if call(make_application(server), link).status != 200} == set()


def test_static_files_when_asked_then_typed_and_kept_for_an_hour() -> None:
    app = make_application(RecordedServer(make_figures()))
    for file, kind in (("observer.css", "text/css"), ("observer.js", "text/javascript")):
        answer = call(app, f"/static/{file}")
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["cache-control"] == "private, max-age=3600"


def test_store_when_rows_were_sampled_then_their_age_in_all_units() -> None:
    figures = make_figures(1)
    figures.stores[0].description.spec.CopyFrom(encode(capture(TensorDict({"x": torch.zeros(2)}, [])).spec))
    shown = " ".join(find_text(read_page(RecordedServer(figures), "/store?name=table-00000")).split())
    assert "Time since it was written 2.5 s 30 s Rows written since 1,500 4,000" in shown
    assert "Versions of the policy since 1.5 3" in shown
    figures.stores[0].ClearField("sample_age")
    assert "newest sample" not in find_text(read_page(RecordedServer(figures), "/store?name=table-00000"))


@pytest.mark.slow
def test_store_when_its_name_is_evil_then_its_page_shows_it_as_text(evil: RecordedServer) -> None:
    for name in EVIL:
        page = read_page(evil, f"/store?name={quote(name)}")
        assert not name.isprintable() or name in find_text(page)
