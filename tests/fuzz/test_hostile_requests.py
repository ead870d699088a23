"""Random requests: an authenticated client that keeps to no rule costs nobody else anything."""

from __future__ import annotations

import pytest

from tests.fuzz.hostile_requests import PER_SESSION, RequestCampaign

pytestmark = pytest.mark.integration


def check_requests(seed: int, num_requests: int) -> None:
    """Sends random requests, and looks for faults."""
    with RequestCampaign(seed) as campaign:
        campaign.run(num_requests)
        assert campaign.list_faults() == []
        assert campaign.codes["ok"] > 0
        assert campaign.codes["InvalidRequestError INVALID_ARGUMENT"] > 0


@pytest.mark.slow
def test_requests_when_they_are_random_then_answered_properly_and_others_go_on() -> None:
    check_requests(3, 6 * PER_SESSION)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_requests_when_they_are_very_many_then_answered_properly_and_others_go_on() -> None:
    check_requests(4, 50_000)
