"""Stores of a cluster that are deleted and made anew under their names: versions and entries of the former ones."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.cluster.moving import choose_other

pytestmark = pytest.mark.integration


def weights(number: int) -> TensorDict:
    return TensorDict({"w": torch.full((4,), float(number))}, [])


@pytest.mark.parametrize("num_moves", [1, 2, 3])
def test_weights_when_they_have_moved_and_were_deleted_then_those_of_the_name_are_newer(
    user: tdserve.ClusterClient, name: str, num_moves: int
) -> None:
    last = user.publish(name, weights(1))
    for _ in range(num_moves):
        user.rebalance(name, choose_other(user, name))
        last = user.publish(name, weights(2))
    with user.subscribe(name, newer_than=last, timeout_s=20.0) as subscription:
        user.delete(name)
        assert user.publish(name, weights(7)) > last
        assert float(next(subscription).data["w"][0]) == 7.0


def test_keyed_store_when_it_is_made_anew_with_other_shards_then_no_former_version_holds(
    user: tdserve.ClusterClient, name: str
) -> None:
    keys = [f"key{number}" for number in range(12)]
    former = user.create_kv(name, shards=3).put(keys, [*range(12)])
    user.delete(name)
    anew = user.create_kv(name, shards=2)
    anew.put(keys, [*range(12)])
    for key, version in zip(keys, former, strict=True):
        with pytest.raises(tdserve.VersionConflictError):
            anew.put(key, 100, if_version=version)
        with pytest.raises(tdserve.VersionConflictError):
            anew.delete(key, if_version=version)
    assert anew.get(keys) == [*range(12)]
