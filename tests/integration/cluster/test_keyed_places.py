"""Entries of shared keyed stores that are read into the caller's place."""

from __future__ import annotations

import pytest

import tdserve
from tests.integration.cluster.filling import rows

pytestmark = pytest.mark.integration


def test_keyed_store_when_read_into_a_place_then_filled_with_the_entries_of_all_servers(
    user: tdserve.ClusterClient, name: str
) -> None:
    kv = user.create_kv(name, like=rows(1)[0], shards="all")
    keys, out = [f"key {number}" for number in range(20)], rows(20)
    kv.put(keys, rows(20))
    out["number"].zero_()
    assert kv.get(keys[::-1], out=out) is out
    assert out["number"].tolist() == list(range(20))[::-1]
    one = out[0].clone()
    assert kv.get("key 7", out=one, numpy=True) is one
    assert int(one["number"]) == 7
    for wrong, key in ((out[:3], keys), (out.exclude("number"), keys), (one, ["key 7"])):
        with pytest.raises(tdserve.SpecMismatchError):
            kv.get(key, out=wrong)
    with pytest.raises(tdserve.InvalidRequestError, match="pass it or out="):
        kv.get(keys, default=None, out=out)
