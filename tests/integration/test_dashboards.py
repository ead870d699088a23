"""The files of deploy/ for Prometheus and Grafana: a live server shows each name in them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import tdserve
from tests.dashboards import DASHBOARD, DEPLOY, list_alerts, list_queries, load_panels
from tests.processes import START_TIMEOUT_S, quiet_port, wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])
SELDOM = {"tdserve_store_degraded_sessions"}
"""What only a cluster with a lost server has."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The observer of a server that has stores of every kind, all of which are in use."""
    place = str(tmp_path_factory.mktemp("place"))
    settings: dict[str, Any] = {"metrics_port": 0, "checkpoint_every_s": 3600.0, "checkpoint_to": place}
    with tdserve.Server(tmp_path_factory.mktemp("shown"), **settings) as server, server.client() as client:
        table = client.create_replay("table", ROW, 100, sampler=tdserve.Prioritized())
        table.extend(ROW.expand(10))
        table.sample(4)
        empty = client.create_replay("empty", ROW, 100)
        client.create_queue("queue", ROW, 100).extend(ROW.expand(2))
        client.publish("weights", ROW)
        followers = client.create_replay("followers", ROW, 100, policy="weights")
        followers.extend(ROW.expand(10))
        followers.sample(4)
        with server.client(transport="gloo") as reader:
            reader.latest("weights")
            shown = f"http://{client.stats()['observer']}"
            wait_for(lambda: wait_in_vain(empty, shown), "a wait that the server has counted")
            yield shown


def wait_in_vain(empty: tdserve.ReplayHandle, url: str) -> bool:
    """Lets a call wait for rows of an empty table. Returns False if it was over before the server could count it."""
    with pytest.raises(tdserve.DeadlineExceededError):
        empty.sample(4, timeout_s=0.01)
    return "tdserve_store_waiting_calls" in scrape(url)


def scrape(url: str) -> dict[str, set[str]]:
    """Returns the names of all series, each with its labels."""
    with urlopen(f"{url}/metrics", timeout=START_TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {each.name: {*each.labels} for family in families for each in family.samples}


@pytest.mark.slow
def test_queries_when_compared_with_a_live_scrape_then_each_name_and_label_is_there(url: str) -> None:
    shown = scrape(url)
    queries, alerts = list_queries(), list_alerts()
    assert len(queries) > 30
    assert len(alerts) > 8
    for query in queries + alerts:
        names = set(re.findall(r"\btdserve_\w+", query))
        assert names <= {*shown} | SELDOM, query
        for name, matchers in re.findall(r"\b(tdserve_\w+)\{([^}]*)\}", query):
            labels = {part.partition("=")[0].strip("!~ ") for part in matchers.split(",")} - {"instance"}
            assert labels <= shown.get(name, labels), query
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            used = set[str]().union(*(shown.get(name, set()) for name in names))
            assert {label.strip() for label in grouping.split(",")} - {"instance"} <= used, query


def test_dashboard_when_read_then_its_panels_do_not_overlap_and_have_units() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in load_panels())


def run_promtool(*arguments: str, shown: str | None = None) -> None:
    """Runs promtool in deploy/, with what is shown to it as its input; it must accept everything."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    command = ["promtool", *arguments]
    done = subprocess.run(command, cwd=DEPLOY, input=shown, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_files_when_promtool_reads_them_then_valid() -> None:
    run_promtool("check", "config", "--syntax-only", "prometheus.yml")
    run_promtool("check", "rules", "alerts.yml")


def test_metrics_when_promtool_checks_a_live_scrape_then_no_name_is_against_the_conventions(url: str) -> None:
    with urlopen(f"{url}/metrics", timeout=START_TIMEOUT_S) as answer:
        shown = answer.read().decode()
    assert "tdserve_store_priority_" in shown
    run_promtool("check", "metrics", shown=shown)


def test_alerts_when_promtool_evaluates_them_then_silent_in_health_and_each_fires_in_trouble() -> None:
    run_promtool("test", "rules", "alerts_test.yml")
    tried = (DEPLOY / "alerts_test.yml").read_text()
    for alert in re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text()):
        assert f"alertname: {alert}, exp_alerts: []" in tried
        assert f'alertname="{alert}"' in tried


def test_compose_file_when_read_then_the_profile_fits_the_other_files() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    services = compose["services"]
    observe = {name for name, service in services.items() if "observe" in service.get("profiles", ())}
    assert observe == {"prometheus", "grafana"}
    for name in observe:
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        for source, target, *_ in (volume.split(":") for volume in services[name]["volumes"]):
            assert (DEPLOY.parent / source).exists() if source.startswith(".") else source in compose["volumes"], target
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:7708"]}]
    assert job["authorization"]["credentials_file"] == services["server"]["environment"]["TDSERVE_TOKEN_FILE"]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert variables[0]["current"]["value"] == source["uid"]


@contextmanager
def run_prometheus(url: str, folder: Path) -> Iterator[str]:
    """Runs a Prometheus that scrapes an observer each second."""
    config = (DEPLOY / "prometheus.yml").read_text().replace("server:7708", url.removeprefix("http://"))
    config = config.replace("alerts.yml", str(DEPLOY / "alerts.yml")).replace("interval: 5s", "interval: 1s")
    config = config.replace("scrape_timeout: 4s", "scrape_timeout: 1s").replace("/run/secrets/token", f"{folder}/token")
    (folder / "prometheus.yml").write_text(config)
    (folder / "token").write_text("none")
    own = f"127.0.0.1:{quiet_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(["prometheus", *options, f"--web.listen-address={own}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{own}"
    finally:
        process.terminate()
        process.wait(30)


def query(prometheus: str, expression: str) -> list[Any]:
    """Returns the result of a query now; fails if Prometheus does not accept it."""
    with urlopen(f"{prometheus}/api/v1/query?query={quote(expression)}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    result: list[Any] = found["data"]["result"]
    return result


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_queries_when_a_real_prometheus_evaluates_them_then_each_has_a_result(url: str, tmp_path: Path) -> None:
    def is_scraped() -> bool:
        try:
            return bool(query(prometheus, "count_over_time(tdserve_up[1m]) > 5"))
        except OSError:
            return False

    with run_prometheus(url, tmp_path) as prometheus:
        wait_for(is_scraped, "some scrapes", timeout_s=60)
        begun_s = time.monotonic()
        empty = [each for each in list_queries() if not query(prometheus, each)]
        assert all('code!="OK"' in each or "leased" in each for each in empty), empty
        assert time.monotonic() - begun_s < 30
        for alert in list_alerts():
            # A few seconds of a busy disk do not predict the next four hours: that alert waits for ten minutes.
            assert not query(prometheus, alert) or "predict_linear" in alert, alert
