"""Nothing acknowledged is lost or doubled, whatever is killed: a short campaign in every run, a long one if asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tdserve.soak.check import Findings
from tests.campaign.campaign import VICTIMS, Campaign

pytestmark = pytest.mark.integration


def check_campaign(folder: Path, num_kills: int, seed: int, *, num_servers: int = 1, has_tls: bool = False) -> None:
    """Runs one; fails with what was lost, doubled or torn."""
    campaign = Campaign(folder, seed=seed, num_servers=num_servers, has_tls=has_tls)
    report = campaign.run(num_kills)
    assert campaign.kills.total() == num_kills
    check_report(report, least=num_kills)


def check_report(report: Findings, *, least: int) -> None:
    """Fails with what was lost, doubled or torn, or if a kind of call was not acknowledged more often than this."""
    assert report.faults == []
    for what in (
        "extends of claimed",
        "extends of asked",
        "extends of chats",
        "overwrites",
        "publishes",
        "changes of keys",
        "changes of entries",
        "acks",
    ):
        assert report.counts[f"{what}: acknowledged"] > least


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_campaign_when_one_of_each_kind_is_killed_then_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    check_campaign(tmp_path, len(VICTIMS), seed=4)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_campaign_when_two_hundred_are_killed_then_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    check_campaign(tmp_path, 200, seed=1)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_campaign_when_three_servers_are_killed_while_stores_move_then_nothing_acknowledged_is_lost(
    tmp_path: Path,
) -> None:
    check_campaign(tmp_path, 60, seed=2, num_servers=3)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_campaign_when_a_server_is_killed_every_few_seconds_for_ten_minutes_then_nothing_acknowledged_is_lost(
    tmp_path: Path,
) -> None:
    campaign = Campaign(tmp_path, seed=21, num_servers=3, every_s=3.0, victims=["server"], num_clients=2)
    report = campaign.run(sys.maxsize, minutes=10.0)
    assert campaign.kills["server"] > 30
    check_report(report, least=100)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_campaign_when_all_connections_are_encrypted_then_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    check_campaign(tmp_path, 15, seed=5, has_tls=True)
