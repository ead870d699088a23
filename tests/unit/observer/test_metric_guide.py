"""tdserve/observer/metric_guide.py: the guide's page has the table of metrics, and all alerts."""

from __future__ import annotations

import re
from pathlib import Path

from tdserve.observer.metric_guide import make_metric_rows

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "tdserve/guide/observe.md").read_text()


def test_page_when_compared_with_the_table_of_metrics_then_the_same() -> None:
    assert "\n\n" + "\n".join(make_metric_rows()) + "\n\n" in PAGE


def test_page_when_compared_with_the_alerts_then_has_advice_for_each() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy/alerts.yml").read_text())
    advised = [name for row in re.findall(r"^\| (`Tds.*?) \|", PAGE, flags=re.MULTILINE) for name in row.split(", ")]
    assert sorted(f"`{alert}`" for alert in alerts) == sorted(advised)
