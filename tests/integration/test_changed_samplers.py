"""Parameters of a sampler that change while its table is in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve


def create(client: tdserve.Client, name: str, sampler: Any) -> tdserve.ReplayHandle:
    """A table of five rows. One of them has four times the priority of the others.

    Weights compare a row with the smallest priority that is left for the consumer. Whichever four rows the consumer
    draws, a row of priority one is left at each draw.
    """
    numbers = torch.arange(5)
    table = client.create_replay(name, TensorDict({"number": numbers[0]}, []), 8, sampler=sampler)
    table.extend(TensorDict({"number": numbers}, [5]), priority=[1.0, 1.0, 1.0, 1.0, 4.0])
    return table


def test_set_sampler_when_beta_changes_then_all_samples_are_weighted_by_it(
    client: tdserve.Client, name: str, server: tdserve.Server
) -> None:
    table = create(client, name, tdserve.Prioritized(alpha=1.0, beta=0.0, eps=0.0))
    conditions: list[dict[str, Any]] = [{}, {"consumer": "c"}, {"require": ("number",)}]

    def list_weights(found: Any) -> set[tuple[float, float]]:
        return set(zip(found["priority"].tolist(), found["priority_weight"].tolist(), strict=True))

    for condition in conditions:  # the selectors that the change meets
        assert list_weights(table.sample(2, **condition)) <= {(1.0, 1.0), (4.0, 1.0)}
    with server.client() as other:
        other.replay(name).set_sampler(tdserve.Prioritized(alpha=1.0, beta=0.5, eps=0.0))
    for condition in (conditions[0], conditions[2]):
        assert list_weights(table.sample(64, **condition)) == {(1.0, 1.0), (4.0, 0.5)}
    for consumer in ("c", "new"):
        assert list_weights(table.sample(2, consumer=consumer)) <= {(1.0, 1.0), (4.0, 0.5)}
    assert client.replay(name).settings.sampler == tdserve.Prioritized(alpha=1.0, beta=0.5, eps=0.0)


@pytest.mark.parametrize(
    ("sampler", "argument"),
    [
        (tdserve.Prioritized(alpha=0.7), "alpha"),
        (tdserve.Prioritized(eps=0.1), "eps"),
        (tdserve.Uniform(), "sampler"),
    ],
)
def test_set_sampler_when_something_cannot_change_then_refused_by_name(
    client: tdserve.Client, name: str, sampler: Any, argument: str
) -> None:
    table = create(client, name, tdserve.Prioritized())
    with pytest.raises(tdserve.InvalidRequestError) as caught:
        table.set_sampler(sampler)
    assert caught.value.argument == argument
    assert client.replay(name).settings.sampler == tdserve.Prioritized()
