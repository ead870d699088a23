from __future__ import annotations

import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.examples.demo.stores import sizes


def test_sizes_of_cartpole() -> None:
    assert sizes("CartPole-v1") == (4, 2)


@pytest.mark.parametrize("env", ["NoSuchThing-v0", "Pendulum-v1", "FrozenLake-v1"])
def test_sizes_of_an_environment_that_the_demo_cannot_learn_names_it(env: str) -> None:
    with pytest.raises(NotSupportedError) as caught:
        sizes(env)
    assert env in caught.value.feature
