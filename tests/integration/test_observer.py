"""The observer beside a real server: scraped, killed, asked by strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError
from tests.integration.conftest import FreshServer
from tests.processes import REPOSITORY, START_TIMEOUT_S, children_of, is_gone, wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server with an observer, for the tests that harm neither."""
    with tdserve.Server(tmp_path_factory.mktemp("observed"), metrics_port=0) as started:
        yield started


def find_url(server: tdserve.Server, token: str | None = None) -> str:
    """Returns where the observer of a server is."""
    with server.client(token=token) as client:
        return f"http://{client.stats()['observer']}"


def fetch(url: str, **headers: str) -> bytes:
    """Returns what is there; waits for an observer that is being started."""
    with urlopen(Request(url, headers=headers), timeout=START_TIMEOUT_S) as answer:
        content: bytes = answer.read()
        return content


def find_status(url: str, **headers: str) -> int:
    """Returns the status of an answer that is an error."""
    with pytest.raises(HTTPError) as caught:
        fetch(url, **headers)
    caught.value.close()
    return caught.value.code


def scrape(url: str) -> dict[str, float]:
    """Returns all series of a scrape: name and labels with the value."""
    families = text_string_to_metric_families(fetch(f"{url}/metrics").decode())
    samples = [sample for family in families for sample in family.samples]
    return {f"{each.name}{sorted(each.labels.items()) or ''}": float(each.value) for each in samples}


def find_observer(server: tdserve.Server) -> int:
    """Returns the process id of a server's observer, which has begun to serve."""
    return wait_for(lambda: next(iter(list_observers(server)), None), "an observer", timeout_s=START_TIMEOUT_S)


def list_observers(server: tdserve.Server) -> list[int]:
    """Returns the process ids of a server's observers."""

    def is_observer(pid: int) -> bool:
        try:
            return b"tdserve.observer" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return [pid for pid in children_of(server.pid) if is_observer(pid)]


@pytest.mark.slow
def test_scrape_when_stores_are_used_then_has_their_figures(observed: tdserve.Server) -> None:
    url = find_url(observed)
    with observed.client() as client:
        table = client.create_replay("t", ROW, 100)
        table.extend(ROW.expand(10))
        table.sample(4)
        client.publish("policy", ROW)
        client.create_queue("q", ROW, max_size=10)

        def look() -> dict[str, float] | None:
            found = scrape(url)
            is_sampled = found.get("tdserve_store_samples_total[('store', 't')]") == 4
            return found if is_sampled and found["tdserve_worker_up[('worker', '0')]"] else None

        found = wait_for(look, "a scrape of these figures")
        assert found["tdserve_up"] == 1
        assert found["tdserve_store_inserts_total[('store', 't')]"] == 10
        assert found["tdserve_store_rows[('kind', 'replay'), ('store', 't')]"] == 10
        assert found["tdserve_store_newest_version[('store', 'policy')]"] == 1
        assert found["tdserve_stores[('kind', 'weights')]"] == 1
        assert found["tdserve_stores[('kind', 'replay')]"] == found["tdserve_stores[('kind', 'queue')]"] == 1
        assert found["tdserve_requests_total[('call', 'publish'), ('code', 'OK'), ('side', 'control')]"] == 1
        for process in ("control", "worker-0", "observer"):
            assert found[f"tdserve_process_resident_memory_bytes[('process', '{process}')]"] > 1 << 20
        assert 0 < found["tdserve_disk_free_bytes"] < found["tdserve_disk_size_bytes"]
        assert abs(found["tdserve_start_time_seconds"] - time.time()) < 3600
        later = wait_for(lambda: look_for_later(url, found), "figures of a later moment")
        assert later["tdserve_start_time_seconds"] == found["tdserve_start_time_seconds"]  # else it seems to restart


def look_for_later(url: str, before: dict[str, float]) -> dict[str, float] | None:
    """Returns a scrape of a later moment; None if it shows the same figures."""
    found, series = scrape(url), "tdserve_process_cpu_seconds_total[('process', 'control')]"
    return found if found[series] > before[series] else None


@pytest.mark.slow
def test_scrape_when_the_server_has_restarted_then_has_what_is_known_of_unused_stores(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path) as server, server.client() as client:
        client.init_remote(ROW.expand(7), "dataset")
        client.create_replay("t", ROW, 100).extend(ROW.expand(10))
    with tdserve.Server(tmp_path, metrics_port=0) as server:
        url = find_url(server)
        found = scrape(url)
        assert found["tdserve_store_rows[('kind', 'tensordict'), ('store', 'dataset')]"] == 7
        assert found["tdserve_store_bytes[('kind', 'tensordict'), ('store', 'dataset')]"] == 7 * 16
        assert found["tdserve_store_bytes[('kind', 'replay'), ('store', 't')]"] > 0
        series = "tdserve_store_rows[('kind', 'replay'), ('store', 't')]"
        assert found.get(series, 10) == 10  # not 0: its rows are counted when it is opened
        with server.client() as client:
            client.replay("t").sample(1)
        wait_for(lambda: scrape(url).get(series) == 10, "a scrape of the opened table")


@pytest.mark.slow
def test_scrape_when_a_call_waits_for_the_limiter_then_seen(observed: tdserve.Server) -> None:
    url = find_url(observed)
    with observed.client() as client:
        table = client.create_replay("waiting", ROW, 100, limiter=tdserve.MinSize(10))
        series = "tdserve_store_waiting_calls[('call', 'sample'), ('store', 'waiting')]"
        with ThreadPoolExecutor(1) as pool:
            sample = pool.submit(table.sample, 4, timeout_s=60)
            wait_for(lambda: scrape(url).get(series) == 1, "a scrape of the waiting call")
            table.extend(ROW.expand(10))
            sample.result()
        wait_for(lambda: scrape(url).get(series) == 0, "a scrape without it")
        found = scrape(url)
        assert found["tdserve_store_waits_total[('call', 'sample'), ('store', 'waiting')]"] == 1
        assert found["tdserve_store_wait_seconds_total[('call', 'sample'), ('store', 'waiting')]"] > 0


@pytest.mark.slow
def test_error_when_a_request_fails_then_counted_by_its_code(observed: tdserve.Server) -> None:
    url = find_url(observed)
    with observed.client() as client:
        client.create_replay("twice", ROW, 100)
        with pytest.raises(tdserve.StoreExistsError):
            client.create_replay("twice", ROW, 100)
    series = "tdserve_requests_total[('call', 'create_store'), ('code', 'ALREADY_EXISTS'), ('side', 'control')]"
    wait_for(lambda: scrape(url).get(series) == 1, "a scrape of the error")


@pytest.mark.slow
def test_observer_when_killed_then_started_again_and_sessions_go_on(fresh_server: FreshServer) -> None:
    server = fresh_server(metrics_port=0)
    url = find_url(server)
    fetch(f"{url}/health")
    with server.client() as client:
        table = client.create_replay("t", ROW, 100)
        session = client.stats()["sessions"]
        os.kill(find_observer(server), signal.SIGKILL)
        table.extend(ROW.expand(10))
        # The socket stays open: a request waits in its queue for the next observer, or the last one still answers it.
        wait_for(lambda: scrape(url)["tdserve_observer_restarts_total"] == 1, "the next observer")
        assert client.stats()["sessions"] == session


@pytest.mark.slow
def test_observer_when_the_server_ends_then_ends(fresh_server: FreshServer) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        server = fresh_server(metrics_port=0)
        observer = find_observer(server)
        os.kill(server.pid, end)
        wait_for(lambda pid=observer: is_gone(pid), "the end of the observer")  # type: ignore[misc]


@pytest.mark.slow
def test_observer_when_the_server_is_stopped_then_answers_that_it_is_down(fresh_server: FreshServer) -> None:
    server = fresh_server(metrics_port=0)
    url = find_url(server)
    assert fetch(f"{url}/health") == b"ok\n"
    os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: scrape(url).get("tdserve_up") == 0, "a scrape of a server that is down")
        assert find_status(f"{url}/health") == 503
    finally:
        os.kill(server.pid, signal.SIGCONT)
    wait_for(lambda: scrape(url).get("tdserve_up") == 1, "a scrape of a server that is up again")


def test_token_when_the_server_has_one_then_a_scrape_needs_it(fresh_server: FreshServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    server = fresh_server(metrics_port=0, token_file=str(tmp_path / "token"))
    url = find_url(server, "s3cret")
    assert b"tdserve_up 1.0" in fetch(f"{url}/metrics", Authorization="Bearer s3cret")
    assert find_status(f"{url}/metrics") == 401
    assert find_status(f"{url}/metrics", Authorization="Bearer wrong") == 401
    process = Path("/proc", str(find_observer(server)))
    assert all(b"s3cret" not in (process / shown).read_bytes() for shown in ("cmdline", "environ"))


def test_observer_when_not_asked_for_then_there_is_none(server: tdserve.Server) -> None:
    with server.client() as client:
        assert client.stats()["observer"] == ""
    assert list_observers(server) == []


def test_port_when_taken_then_the_server_does_not_start(fresh_server: FreshServer) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidRequestError, match="cannot be listened"),
    ):
        fresh_server(metrics_port=taken.getsockname()[1])


@pytest.mark.slow
def test_packages_when_missing_then_one_line_has_the_command_that_installs_them(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
        "from tdserve.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "serve", str(tmp_path / "root"), "--port", "0", "--metrics-port", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("uvicorn is not installed: pip install 'tdserve[observe]'")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_calls_when_a_client_makes_some_then_what_it_has_observed_is_shown(
    fresh_server: FreshServer, transport: Any
) -> None:
    server = fresh_server(metrics_port=0)
    url = find_url(server)
    series = "tdserve_request_duration_seconds_count[('call', '{}'), ('side', 'client')]"
    with server.client(transport=transport) as client:
        table = client.create_replay("t", ROW, 100)
        for _ in range(20):  # most of them by a claim, of which control learns later
            table.extend(ROW.expand(5))

        def look() -> dict[str, float] | None:
            table.sample(4)  # without a request, but the one that reports when it is time
            found = scrape(url)
            return found if series.format("sample") in found else None

        found = wait_for(look, "a scrape of what the client has observed")
        assert found[series.format("extend")] == 20
        assert found[series.format("create_store")] == 1


@pytest.mark.slow
def test_work_when_workers_move_content_then_shown_by_order_and_call(fresh_server: FreshServer) -> None:
    server = fresh_server(metrics_port=0)
    url = find_url(server)
    with server.client(transport="gloo") as client:
        table = client.create_replay("t", ROW, 100)
        for _ in range(20):
            table.extend(ROW.expand(5))  # the first by an order, later ones into rows that the worker has claimed
            table.sample(4)  # the worker answers these without control
        slow = client.create_replay("slow", ROW, 100, sampler=tdserve.Prioritized())
        slow.extend(ROW.expand(5))
        for _ in range(10):
            slow.sample(4)
    found = wait_for(lambda: look_for_work(url, "send_rows"), "a scrape of the work")
    series = "tdserve_request_duration_seconds_{}[('call', '{}'), ('side', 'worker')]"
    assert found[series.format("count", "send_rows")] >= 10
    assert found[series.format("count", "receive_rows")] >= 2
    assert 0 < found[series.format("count", "sample")] <= 20
    assert 0 < found[series.format("count", "extend")] < 20
    for call in ("send_rows", "sample", "extend"):
        assert 0 < found[series.format("sum", call)] < 60
        assert found[f"tdserve_requests_total[('call', '{call}'), ('code', 'OK'), ('side', 'worker')]"] > 0


def look_for_work(url: str, call: str) -> dict[str, float] | None:
    """Returns a scrape that has an order of data workers; None if none has."""
    found = scrape(url)
    return found if f"tdserve_request_duration_seconds_count[('call', '{call}'), ('side', 'worker')]" in found else None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_ages_when_rows_are_sampled_then_shown_whoever_draws_them(fresh_server: FreshServer, transport: Any) -> None:
    server = fresh_server(metrics_port=0)
    url = find_url(server)
    with server.client(transport=transport) as client:
        client.publish("policy", ROW)
        plain = client.create_replay("plain", ROW, 1000)  # workers and local clients draw by themselves
        fresh = client.create_replay("fresh", ROW, 1000, sampler=tdserve.Lifo(), policy="policy")
        queue = client.create_queue("queue", ROW, max_size=100)
        plain.extend(ROW.expand(10))
        fresh.extend(ROW.expand(10), policy_version=1)
        queue.extend(ROW.expand(10))
        client.publish("policy", ROW)
        fresh.extend(ROW.expand(2), policy_version=2)
        plain.extend(ROW.expand(90))
        assert not any("sample_age" in series for series in scrape(url))
        for _ in range(5):
            plain.sample(32)
        fresh.sample(2)
        with queue.take(4):
            pass

        def look() -> dict[str, float] | None:
            found = scrape(url)
            return found if sum("sample_age_rows" in series for series in found) == 3 else None

        found = wait_for(look, "a scrape of the ages")
    assert 35 < found["tdserve_store_sample_age_rows[('store', 'plain')]"] < 65  # of 0 to 99
    assert found["tdserve_store_sample_age_rows[('store', 'fresh')]"] == 0.5
    assert found["tdserve_store_sample_lag_versions[('store', 'fresh')]"] == 0
    assert found["tdserve_store_sample_age_rows[('store', 'queue')]"] == 7.5
    assert all(
        0 <= found[f"tdserve_store_sample_age_seconds[('store', '{name}')]"] < 120 for name in ("plain", "queue")
    )


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_session_when_content_moves_then_its_bytes_whichever_way_they_go(
    fresh_server: FreshServer, transport: Any
) -> None:
    server = fresh_server()
    rows = TensorDict({"x": torch.zeros(100, 1000)}, [100])
    with server.client(transport=transport) as client, server.client() as other:
        table = client.create_replay("t", rows[0], 1000)
        for _ in range(5):  # the last ones into claimed rows
            table.extend(rows)
        client.init_remote(rows, "store")
        client.publish("policy", rows)
        moved = rows["x"].nbytes
        for _ in range(3):
            table.sample(100)  # the last ones without control
        client.from_remote_init("store")
        assert client.latest("policy") is not None

        num_looks = 0

        def look() -> list[int] | None:
            nonlocal num_looks
            num_looks += 1
            table.sample(1)  # reports if it is time
            sessions = other.catalog.observe(max_sessions=10).sessions
            found = [max(getattr(each, name) for each in sessions) for name in ("bytes_in", "bytes_out")]
            return found if found[1] >= 5 * moved else None

        bytes_in, bytes_out = wait_for(look, "a report of the bytes", timeout_s=30)
    assert 7 * moved <= bytes_in < 7.1 * moved
    assert 5 * moved <= bytes_out < 5.1 * moved + num_looks * (rows[0]["x"].nbytes + 100)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_client_when_it_closes_then_its_last_calls_are_counted(fresh_server: FreshServer, transport: Any) -> None:
    server = fresh_server()
    with server.client(transport=transport) as client:
        table = client.create_replay("table", like=ROW, capacity=10)
        table.extend(ROW.expand(4))
        for _ in range(3):
            table.sample(2)
    with server.client() as client:

        def count_calls() -> dict[str, int]:
            calls = client.catalog.observe().calls
            return {each.call: sum(each.buckets) for each in calls if each.side == "client"}

        counted = wait_for(lambda: found if (found := count_calls()) else None, "the last report")
    assert (counted["sample"], counted["extend"]) == (3, 1)


def measure_cpu_s(pid: int) -> float:
    """Returns the processor time that a process has taken."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


@pytest.mark.full
def test_scrapes_when_there_is_one_each_second_then_they_take_control_and_workers_few_percent_of_a_core(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server(metrics_port=0)
    url, num_scrapes = find_url(server), 10
    with server.client() as client:
        for number in range(20):
            table = client.create_replay(f"t{number}", ROW, 100)
            table.extend(ROW.expand(10))
            table.sample(4)
        figures = client.catalog.observe(max_stores=1)
        pids = [each.pid for each in figures.processes if each.process == "control" or "worker" in each.process]
        scrape(url)
        before_s = sum(map(measure_cpu_s, pids))
        for _ in range(num_scrapes):
            shown_s = time.monotonic()
            wait_for(lambda: time.monotonic() - shown_s > 1.1, "figures that are too old to be shown again")  # noqa: B023
            scrape(url)
        assert (sum(map(measure_cpu_s, pids)) - before_s) / num_scrapes < 0.03
