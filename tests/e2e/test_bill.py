"""The bill of materials of the image."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import docker
from tests.sbom import LIST_PACKAGES, SCRIPT, check_bill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_bill_when_of_the_image_then_lists_the_packages_in_it(image: str, tmp_path: Path) -> None:
    find = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "tool"), "cyclonedx-bom"]
    if subprocess.run(find, capture_output=True, check=False).returncode:
        pytest.skip("pip does not find cyclonedx-bom here")
    path = tmp_path / "bill.json"
    subprocess.run(["env", f"PYTHON={sys.executable}", "sh", str(SCRIPT), "--image", image, str(path)], check=True)
    check_bill(path, docker("run", "--rm", "--entrypoint", "python", image, "-c", LIST_PACKAGES).stdout)
