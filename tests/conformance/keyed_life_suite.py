"""More tests that keyed stores must pass over every transport: order of puts, limits, and the life of a store."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tdserve
from tests.conformance.keyed_mapping_suite import KeyedMappingSuite
from tests.conformance.keyed_suite import assert_same, entry
from tests.conformance.suite import Connect
from tests.processes import wait_for


@pytest.mark.integration
class KeyedLifeSuite(KeyedMappingSuite):
    """All requirements of keyed stores; ``connect`` as in ``KeyedSuite``."""

    # ------------------------------------------------------------ order, limits

    @pytest.mark.slow
    def test_put_when_early_then_in_the_order_of_the_calls(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        futures = [kv.put(["a", str(number)], [number, number], return_early=True) for number in range(200)]
        refused = kv.put("a", -1, if_version=0, return_early=True)
        futures.append(kv.put("a", 200, return_early=True))
        versions = [future.result(30.0) for future in futures]
        with pytest.raises(tdserve.VersionConflictError):
            refused.result(30.0)
        assert kv["a"] == 200
        assert kv.versions("a") == versions[-1]
        assert [kv[str(number)] for number in (0, 199)] == [0, 199]
        last = [kv.put("b", number, return_early=True) for number in range(20)]
        assert kv.delete("b") == 1
        assert all(future.done() for future in last)

    @pytest.mark.slow
    def test_put_when_max_bytes_is_reached_then_refused(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, max_bytes=100_000)
        kv.put(["a", "b"], [b"x" * 40_000] * 2)
        with pytest.raises(tdserve.CapacityError):
            kv.put("c", b"x" * 40_000)
        with pytest.raises(tdserve.TooLargeError):
            kv.put("c", b"x" * 100_000)
        for _ in range(20):
            kv.put("a", b"y" * 40_000)
        kv.delete("b")
        kv.put("c", b"x" * 40_000)
        assert kv.keys() == ["a", "c"]

    @pytest.mark.slow
    def test_put_when_lru_then_what_is_not_used_makes_room(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, max_bytes=100_000, eviction="lru")
        for number in range(50):
            kv.put(f"{number}", b"x" * 9_000)
            assert len(kv["0"]) == 9_000  # this entry is used all the time
        found = kv.keys()
        assert "0" in found
        assert "49" in found
        assert 9 <= len(found) <= 11

    @pytest.mark.slow
    def test_get_when_the_time_to_live_is_over_then_missing(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, ttl_s=0.5)
        kv.put(["a", "b"], [1, 2])
        assert kv.get(["a", "b"]) == [1, 2]
        wait_for(lambda: "a" not in kv, "the end of an entry")
        assert kv.keys() == []
        assert len(kv) == 0
        assert kv.put("a", 3, if_version=0) > 2
        assert kv["a"] == 3

    # ------------------------------------------------------------ the store

    @pytest.mark.slow
    def test_create_when_it_exists_then_as_for_every_store(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, like=entry(0), max_bytes=1_000_000)
        kv.put("a", entry(1))
        with pytest.raises(tdserve.StoreExistsError):
            client.create_kv(name, like=entry(0), max_bytes=1_000_000)
        with pytest.raises(tdserve.StoreExistsError):
            client.create_kv(name, like=entry(0), exists_ok=True)
        same = client.create_kv(name, like=entry(5), max_bytes=1_000_000, exists_ok=True)
        assert_same(same["a"], entry(1))
        assert_same(client[name]["a"], entry(1))
        assert_same(pickle.loads(pickle.dumps(kv))["a"], entry(1))
        description = client.describe(name)
        assert (description.kind, description.num_rows) == ("keyed", 1)
        with pytest.raises(tdserve.WrongStateError):
            client.replay(name)
        with pytest.raises(tdserve.WrongStateError):
            client.from_remote_init(name)
        with pytest.raises(tdserve.InvalidRequestError):
            client.create_kv(f"{name}-other", eviction="lru")

    @pytest.mark.slow
    def test_delete_when_the_store_is_deleted_then_its_handles_raise(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        kv.put("a", 1)
        with connect() as other:
            far = other.kv(name)
            assert far["a"] == 1
            client.delete(name)
            for handle in (kv, far):
                with pytest.raises(tdserve.StoreNotFoundError):
                    handle["a"]
                with pytest.raises(tdserve.StoreNotFoundError):
                    handle.put("a", 1)
            client.create_kv(name)
            assert "a" not in far
            far.put("a", 2)
            assert kv["a"] == 2
            client.delete(name)
            client.create_kv(name, like=torch.zeros(2))
            with pytest.raises(tdserve.SpecMismatchError):
                far.put("a", 2)

    @pytest.mark.slow
    def test_kv_when_opened_before_it_exists_then_waits(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        with pytest.raises(tdserve.StoreNotFoundError):
            client.kv(name, timeout_s=0)
        with connect() as other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.kv, name, timeout_s=30.0)
            client.create_kv(name).put("a", 1)
            assert waiting.result(30.0)["a"] == 1

    @pytest.mark.slow
    def test_reads_when_batches_are_put_then_never_see_a_mixture(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name, like=torch.zeros(64, dtype=torch.int64))
        keys = [str(number) for number in range(16)]

        def put(number: int) -> Any:
            return kv.put(keys, torch.full((16, 64), number), return_early=True)

        put(0).result(30.0)
        with connect() as other:
            far, seen = other.kv(name), 0
            for number in range(1, 60):
                future = put(number)
                while not future.done():
                    found = far.get(keys).unique().tolist()
                    assert len(found) == 1, "a mixture"
                    assert found[0] >= seen, "an older state"
                    seen = found[0]
