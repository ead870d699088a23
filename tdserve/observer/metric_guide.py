"""The table of metrics as the guide's page ``observe`` prints it: ``python -m tdserve.observer.metric_guide``."""

from __future__ import annotations

import sys

from tdserve.observer.metric_table import METRICS

HEADER = ("| metric | kind | labels | meaning |", "|---|---|---|---|")


def make_metric_rows() -> list[str]:
    """Returns the lines of the table, in Markdown."""
    rows = list(HEADER)
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return rows


if __name__ == "__main__":
    sys.stdout.write("\n".join(make_metric_rows()) + "\n")
