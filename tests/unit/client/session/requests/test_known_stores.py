from __future__ import annotations

import torch
from tensordict import TensorDict

from tdserve.client.session.requests.known_stores import MAX_KNOWN, MAX_LEAVES, KnownStore, KnownStores
from tdserve.structure.captures.capture import capture

STORE = KnownStore("uid.0", capture(TensorDict({}, [])).spec)


def test_find_when_learnt_then_the_last_one_until_it_is_forgotten() -> None:
    stores = KnownStores()
    assert stores.find("s") is None
    stores.learn("s", STORE)
    stores.learn("s", STORE._replace(identity="uid.1"))
    assert stores.find("s") == STORE._replace(identity="uid.1")
    stores.forget("s")
    stores.forget("s")
    assert stores.find("s") is None


def test_learn_when_there_are_too_many_then_the_first_one_goes() -> None:
    stores = KnownStores()
    for number in range(MAX_KNOWN + 1):
        stores.learn(f"s{number}", STORE)
    assert [stores.find(name) is None for name in ("s0", "s1", f"s{MAX_KNOWN}")] == [True, False, False]


def test_learn_when_large_ones_have_too_many_leaves_then_the_first_ones_go() -> None:
    num_leaves = 1000
    td = TensorDict({str(number): torch.zeros(0) for number in range(num_leaves)}, [])
    large = KnownStore("uid.0", capture(td).spec)
    stores = KnownStores()
    num_kept = MAX_LEAVES // num_leaves
    for number in range(num_kept + 2):
        stores.learn(f"s{number}", large)
        stores.learn(f"s{number}", large)
    assert [stores.find(f"s{number}") is None for number in (0, 1, 2, num_kept + 1)] == [True, True, False, False]
