"""Damage that a call meets is in the metrics, whichever side finds it. Its first error is an increase."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import tdserve
from tests.processes import START_TIMEOUT_S, wait_for

pytestmark = pytest.mark.integration


def scrape_damage(url: str) -> dict[str, float]:
    """Returns how many reads have failed because of damage, by the side that has found it."""
    with urlopen(f"{url}/metrics", timeout=START_TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    found = [each for each in samples if each.name == "tdserve_requests_total"]
    wanted = {"call": "read", "code": "DATA_LOSS"}
    return {each.labels["side"]: each.value for each in found if wanted.items() <= each.labels.items()}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_damage_when_a_client_meets_it_then_its_first_error_is_an_increase(tmp_path: Path, transport: Any) -> None:
    with tdserve.Server(tmp_path, metrics_port=0) as server:
        with server.client() as client:
            client.memmap(TensorDict({"x": torch.arange(64)}, [64]), "s")
        server.shutdown()
        os.truncate(tmp_path / "stores/s/rows/x.memmap", 8)
        server.start()
        with server.client() as client:
            url = f"http://{client.stats()['observer']}"
        before = scrape_damage(url)
        assert (before["control"], before["client"]) == (0, 0)
        with server.client(transport=transport) as client, pytest.raises(tdserve.CorruptDataError):
            client["s"].get("x")
        wait_for(lambda: scrape_damage(url)["client"] == 1, "the client's report")
        assert scrape_damage(url)["control"] == (transport == "gloo")
