"""Bills of materials, as ``deploy/sbom.sh`` writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "deploy" / "sbom.sh"

LIST_PACKAGES = """
import importlib.metadata, json
print(json.dumps([[each.name, each.version] for each in importlib.metadata.distributions()]))
"""
"""A program that prints the packages of its environment."""


def check_bill(path: Path, listed: str) -> None:
    """Checks that a bill names exactly the packages that ``LIST_PACKAGES`` has printed, and not the tool that wrote it.

    Args:
        path: The bill.
        listed: What was printed.
    """
    content = json.loads(path.read_text())
    assert content["bomFormat"] == "CycloneDX"
    found = {(_normalize(each["name"]), each["version"]) for each in content["components"]}
    assert found == {(_normalize(name), version) for name, version in json.loads(listed)}
    (ours,) = (each for each in content["components"] if each["name"] == "tdserve")
    assert ours["licenses"][0]["license"]["id"] == "MIT"


def _normalize(name: str) -> str:
    """Returns a name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
