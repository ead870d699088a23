"""Options of a creation that several servers share are refused as by one server, before anything is recorded."""

from __future__ import annotations

from typing import Any

import pytest

import tdserve
from tests.integration.cluster.filling import rows
from tests.integration.cluster.names import next_name

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"remover": tdserve.Lifo()}, TypeError),
        ({"limiter": tdserve.MinSize(3)}, TypeError),
        ({"sampler": tdserve.Uniform()}, tdserve.InvalidRequestError),
    ],
)
def test_queue_when_an_option_is_none_of_queues_then_the_error_of_one_server_and_no_record(
    client: tdserve.ClusterClient, options: dict[str, Any], error: type[Exception]
) -> None:
    name, words = next_name(), []
    for shards in (1, 2):
        with pytest.raises(error) as caught:
            client.create_queue(name, rows(1)[0], 10, shards=shards, exists_ok=True, **options)
        words.append(str(caught.value))
    assert words[0] == words[1]
    assert name not in client
