"""Damaged PEM files: refused by name, in one line."""

from __future__ import annotations

import pytest

from tests.fuzz.tls_files import TLSCampaign

pytestmark = pytest.mark.integration


def check_files(seed: int, num_inputs: int) -> TLSCampaign:
    """Damages files, and looks for faults."""
    campaign = TLSCampaign(seed)
    campaign.run(num_inputs)
    assert campaign.faults == []
    return campaign


@pytest.mark.slow
def test_files_when_damaged_then_refused_by_name_in_one_line_or_of_use() -> None:
    outcomes = check_files(1, 100).outcomes
    assert all(outcomes[f"server: {name}: refused"] > 0 for name in ("server.pem", "server.key", "ca.pem"))
    assert all(outcomes[f"client: {name}: refused"] > 0 for name in ("client.pem", "client.key", "ca.pem"))


@pytest.mark.full
def test_files_when_damaged_in_very_many_ways_then_refused_by_name_in_one_line_or_of_use() -> None:
    check_files(2, 4_000)
