"""The observer's pages beside a real server, by HTTP and in a browser."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from statistics import median
from urllib.parse import quote

import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdserve
from tests.browser import CHROMIUM, Page, open_browser
from tests.integration.test_observer import fetch, find_status, find_url
from tests.processes import wait_for

pytestmark = pytest.mark.integration

EVIL = "<img src=x onerror=document.title='pwned'>"

NUM_SESSIONS = 200

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The observer of a server whose stores have hostile names."""
    with tdserve.Server(tmp_path_factory.mktemp("shown"), metrics_port=0) as server, server.client() as client:
        fill(client)
        yield find_url(server)


def fill(client: tdserve.Client) -> None:
    """Makes stores of all kinds."""
    chat = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": "two\nlines"}]
    row = TensorDict({"frame": torch.zeros(16, 16, 3, dtype=torch.uint8), "chat": NonTensorData(chat)}, [])
    client.create_replay(EVIL, row, 100, sampler=tdserve.Prioritized(alpha=1.0, beta=0.5)).extend(
        TensorDict.lazy_stack([row.clone() for _ in range(20)]), priority=torch.arange(20.0)
    )
    number = torch.arange(10_000.0)
    client.create_replay("long", TensorDict({"x": number[0]}, []), 10_000, sampler=tdserve.Prioritized()).extend(
        TensorDict({"x": number}, [10_000]), priority=number
    )
    row = TensorDict({"x": torch.tensor(0.0)}, [])
    client.create_replay("sorted", row, 20, remover=tdserve.LowestPriority()).extend(
        row.expand(20).clone(), priority=torch.arange(20.0)
    )
    for name, sampler in (("fifo", tdserve.Fifo()), ("ranked", tdserve.HighestPriority())):
        client.create_queue(name, row, 20, policy="prioritized", sampler=sampler).extend(row.expand(20).clone())
    client.init_remote(TensorDict({EVIL: torch.arange(30.0), "text": NonTensorData(EVIL)}, []), "settings")
    client.init_remote(TensorDict({"big": torch.zeros(9 << 20)}, []), "large")
    client.publish("policy", TensorDict({"w": torch.zeros(3)}, []))
    assert client.latest("policy") is not None
    client.create_kv("cache").put("k", torch.ones(2))


def read_text(url: str) -> str:
    """Returns what a page shows."""
    page = fetch(url).decode()
    assert EVIL not in page
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.mark.slow
def test_pages_when_a_store_is_evil_then_shown_as_text(url: str) -> None:
    assert EVIL in read_text(f"{url}/stores")
    shown = read_text(f"{url}/store?name={quote(EVIL)}")
    assert "Capacity 100" in shown
    assert "frame uint8 [16, 16, 3]" in shown
    assert "sampler prioritized alpha 1.0" in shown


@pytest.mark.slow
def test_rows_when_shown_then_as_pictures_chats_and_histograms_and_not_counted(url: str) -> None:
    page = fetch(f"{url}/rows?name={quote(EVIL)}").decode()
    assert EVIL not in page
    images = re.findall(r'<img src="(/image\?id=[^"]+)"', page)
    assert len(images) == 8
    assert fetch(url + images[0])[:4] == b"\x89PNG"
    assert page.count("<dt>assistant</dt><dd>two\nlines</dd>") == 8
    assert 'aria-label="Priorities: from 0 to 19, mean 9.5"' in page
    assert "Rows out 0" in read_text(f"{url}/store?name={quote(EVIL)}")
    assert "at equal distances" not in page


def test_rows_when_a_table_is_long_then_its_priorities_are_those_of_rows_from_all_of_it(url: str) -> None:
    page = fetch(f"{url}/rows?name=long").decode()
    assert "Of 4,096 rows at equal distances, out of 10,000." in page
    found = re.search(r'aria-label="Priorities: from 0 to 9999, mean (\S+)"', page)
    assert found is not None
    assert abs(float(found[1]) - 4999.5) < 10


def test_rows_when_only_the_remover_uses_priorities_then_they_are_shown(url: str) -> None:
    assert 'aria-label="Priorities: from 0 to 19, mean 9.5"' in fetch(f"{url}/rows?name=sorted").decode()


@pytest.mark.parametrize("name", ["settings", "policy", "cache", "fifo", "ranked"])
def test_rows_when_of_other_kinds_then_shown(url: str, name: str) -> None:
    assert "First rows" in read_text(f"{url}/rows?name={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "nothing", ""])
def test_rows_when_too_large_or_absent_then_the_page_has_the_reason(url: str, name: str) -> None:
    assert find_status(f"{url}/rows?name={name}") == 404


def test_sessions_when_shown_then_each_client_and_the_readers_of_weights(url: str) -> None:
    assert "shm" in read_text(f"{url}/sessions")
    assert "Version 1, published" in read_text(f"{url}/weights")


PAGES = ("/", "/live.json", "/stores", "/stores?page=50", "/stores?filter=4999", "/store?name=store-00042", "/sessions")


@pytest.mark.full
def test_pages_when_there_are_5000_stores_and_200_sessions_then_each_within_300_ms(tmp_path: Path) -> None:
    with ExitStack() as opened:
        server = opened.enter_context(tdserve.Server(tmp_path / "root", metrics_port=0))
        clients = [
            opened.enter_context(server.client(transport="gloo" if number % 4 == 0 else "shm"))
            for number in range(NUM_SESSIONS)
        ]
        for number in range(5_000):
            content = TensorDict({"x": torch.zeros(()), "y": torch.arange(8.0)}, [])
            clients[number % NUM_SESSIONS].init_remote(content, f"store-{number:05}")
        url, took_s = find_url(server), dict[str, list[float]]()
        assert f"{NUM_SESSIONS} open" in read_text(f"{url}/sessions")
        for page in (*PAGES, "/metrics") * 5:
            shown_s = time.monotonic()
            wait_for(lambda: time.monotonic() - shown_s > 1.1, "figures that are too old to be shown again")  # noqa: B023
            begun_s = time.monotonic()
            fetch(f"{url}{page}")
            took_s.setdefault(page, []).append(time.monotonic() - begun_s)
        assert {page: median(each) for page, each in took_s.items() if median(each) >= 0.3} == {}


@needs_browser
@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("/", "Overview"),
        ("/stores", "Stores"),
        (f"/rows?name={quote(EVIL)}", f"Rows of {EVIL}"),
        (f"/store?name={quote(EVIL)}", EVIL),
    ],
)
def test_browser_when_it_shows_a_page_then_charts_are_there_and_nothing_of_a_store_runs(
    url: str, page: str, title: str, tmp_path: Path
) -> None:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", url + page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    shown = unescape(re.findall(r"<title>(.*?)</title>", done.stdout)[0])
    assert shown == f"{title} \N{EN DASH} tdserve"
    assert "Content Security Policy" not in done.stderr
    assert done.stdout.count('<figure class="chart">') == (8 if page == "/" else 0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for the tests that leave nothing behind in it."""
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_pages_when_on_a_phone_in_any_colours_then_as_wide_as_it_and_without_a_fault(
    url: str, browser: Page, is_dark: bool
) -> None:
    browser.set_size(360, 740, is_dark=is_dark)
    evil = quote(EVIL)
    for path in (
        "/",
        "/stores",
        f"/store?name={evil}",
        f"/rows?name={evil}",
        "/weights",
        "/sessions",
        "/guide/observe",
    ):
        browser.open(url + path)
        assert browser.evaluate("document.documentElement.scrollWidth") == 360, path
        light = sum(map(int, re.findall(r"\d+", browser.evaluate("getComputedStyle(document.body).backgroundColor"))))
        assert (light < 150) == is_dark
    assert browser.log == []


@needs_browser
def test_pages_when_only_the_keyboard_is_used_then_the_content_and_the_other_pages_are_reached(
    url: str, browser: Page
) -> None:
    browser.set_size(1000, 800)
    browser.open(f"{url}/")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # it is shown now
    found = []
    for _ in range(3):
        browser.press("Tab")
        found.append(browser.evaluate("document.activeElement.textContent.trim()"))
    assert found == ["tdserve", "Overview", "Stores"]
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter")
    browser.wait_loaded()
    assert browser.evaluate("document.title") == "Stores \N{EN DASH} tdserve"


@needs_browser
def test_charts_when_time_passes_then_they_have_lines(url: str, browser: Page) -> None:
    browser.open(f"{url}/")
    num_lines = "document.querySelectorAll('.chart path[d*=L]').length"
    wait_for(lambda: browser.evaluate(num_lines) == 8, "lines of two points", timeout_s=60)
