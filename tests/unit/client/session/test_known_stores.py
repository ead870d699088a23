from __future__ import annotations

from tensordict import TensorDict

from tdserve.client.session.known_stores import MAX_KNOWN, KnownStore, KnownStores
from tdserve.structure.capture import capture

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
