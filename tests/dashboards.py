"""The queries of deploy/'s dashboard and alerts, as a Prometheus takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/tdserve.json"
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$instance": ".*", "$store": ".*"}


def load_panels() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard that show something."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def list_queries() -> list[str]:
    """Returns all queries of the dashboard, with values for its variables."""
    queries = [target["expr"] for panel in load_panels() for target in panel["targets"]]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


def list_alerts() -> list[str]:
    """Returns the expressions of all alerts."""
    text = re.sub(r">-\n +(.*)\n +(.*)", r"\1 \2", (DEPLOY / "alerts.yml").read_text())
    return re.findall(r"^ +expr: (.*)$", text, flags=re.MULTILINE)
