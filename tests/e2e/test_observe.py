"""The compose file's profile "observe": Prometheus scrapes the job, no panel is empty, a killed container is seen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.dashboards import list_alerts, list_queries
from tests.e2e import programs
from tests.e2e.conftest import BUILD_TIMEOUT_S, MakeStack
from tests.e2e.stack import Stack, docker, inspect, logs
from tests.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STAND_IN = "tdserve-e2e-prometheus"
PROMETHEUS = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\
    && mkdir /prometheus && chown 65534:65534 /prometheus
ENTRYPOINT ["prometheus"]
"""
"""Debian's package, for machines that cannot get the image that the compose file names."""

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def prometheus(image: str) -> str:
    """The image of Prometheus: that of the compose file, or one made of Debian's package."""
    named = os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0")
    if docker("pull", "-q", named, check=False).returncode == 0:
        return named
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    command = ("build", "-q", "-t", STAND_IN, "--build-arg", f"BASE_IMAGE={base}", "-")
    if docker(*command, stdin=PROMETHEUS, check=False, timeout_s=BUILD_TIMEOUT_S).returncode != 0:
        pytest.skip("there is neither the image of Prometheus nor Debian's package")
    return STAND_IN


@pytest.fixture(scope="module")
def stack(make_stack: MakeStack, prometheus: str) -> Stack:
    """The demo's job, which goes on, with its observer and Prometheus; Grafana's queries need no Grafana."""
    settings = {"TDSERVE_DEMO_SECONDS": "900", "TDSERVE_DEMO_TARGET": "1000", "TDSERVE_METRICS_PORT": "7708"}
    stack = make_stack(PROMETHEUS_IMAGE=prometheus, **settings)
    stack.compose("--profile", "observe", "up", "-d", "--no-build", "server", "learner", "actor", "prometheus")
    return stack


@pytest.fixture
def user(stack: Stack) -> Iterator[str]:
    """A container that uses what the demo does not, until it is killed."""
    name = f"{stack.name}-user"
    wait_for(lambda: stack.version() > 1, "a policy", timeout_s=TIMEOUT_S)
    stack.compose("run", "-d", "--no-deps", "--name", name, "--entrypoint", "python", "actor", "-c", programs.USE_ALL)
    wait_for(lambda: "all are used" in logs(name), "stores of all kinds", timeout_s=TIMEOUT_S)
    yield name
    docker("rm", "-f", "-v", name)


def count_series(stack: Stack, *queries: str) -> list[int]:
    """Returns how many series Prometheus has for each query now."""
    printed = stack.python(programs.QUERY.format(queries=json.dumps(queries))).stdout
    return [int(line) for line in printed.split()]


def read_page(stack: Stack, path: str) -> str:
    """Returns a page of the observer; "" while it does not answer."""
    done = stack.python(programs.PAGE.format(path=path), check=False)
    return done.stdout if done.returncode == 0 else ""


def test_dashboard_when_the_job_runs_then_no_panel_is_empty_and_a_killed_client_leaves_the_page(
    stack: Stack, user: str
) -> None:
    queries = list_queries()

    def find_empty() -> list[str]:
        return [query for query, num in zip(queries, count_series(stack, *queries), strict=True) if not num]

    wait_for(lambda: not find_empty(), "a series for each panel", timeout_s=TIMEOUT_S)
    firing = [alert for alert, num in zip(list_alerts(), count_series(stack, *list_alerts()), strict=True) if num]
    # The first minutes of a busy disk do not predict the next four hours: that alert waits for ten minutes.
    assert not [alert for alert in firing if "predict_linear" not in alert]
    host = inspect(user)["Config"]["Hostname"]
    assert f"{host}:" in read_page(stack, "/sessions")
    docker("kill", user)
    wait_for(lambda: f"{host}:" not in (read_page(stack, "/sessions") or host + ":"), "a page without it", timeout_s=60)


def test_page_when_the_server_is_killed_then_it_is_back_and_prometheus_has_seen_it(stack: Stack) -> None:
    assert "Up for" in read_page(stack, "/")
    before = inspect(stack.container("server"))["RestartCount"]
    stack.kill("server")
    wait_for(lambda: inspect(stack.container("server"))["RestartCount"] > before, "a restart", timeout_s=TIMEOUT_S)
    wait_for(lambda: "Up for" in read_page(stack, "/"), "the page of the new server", timeout_s=TIMEOUT_S)
    changed = "changes(tdserve_start_time_seconds[10m]) > 0"
    wait_for(lambda: count_series(stack, changed) == [1], "the restart in Prometheus", timeout_s=TIMEOUT_S)
