from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, LocalProtocolError, NotSupportedError
from tdserve.client.groups.agreement import Agreed
from tdserve.client.groups.group import describe_rank, get_spec
from tests.group_members import Team, content, number_in


@pytest.fixture(scope="module")
def team(server: tdserve.Server) -> Iterator[Team]:
    """Two members."""
    with Team(server, 2) as made:
        yield made


@pytest.mark.parametrize("src", [-1, 2, None, True, 1.0])
def test_call_when_the_rank_is_none_then_every_member_raises_and_goes_on(team: Team, src: Any) -> None:
    errors = team.each(lambda group: group.broadcast(content(1), src))
    assert [type(error) for error in errors] == [InvalidRequestError] * 2
    assert errors[0].argument == "src"
    assert team.each(lambda group: group.barrier()) == [None, None]


def test_call_when_a_structure_comes_again_then_it_is_not_sent_again(team: Team) -> None:
    for number in range(3):
        td = content(number, 11)
        found = team.each(lambda group, td=td: group.broadcast(td if group.rank == 0 else None, 0))  # type: ignore[misc]
        assert [number_in(td, 11) for td in found] == [number] * 2
    before = len(team.epochs[0].known.specs)
    team.each(lambda group: group.broadcast(content(9, 11), 0))
    assert [len(epoch.known.specs) for epoch in team.epochs] == [before, before]


def test_call_when_no_member_allows_pickle_then_not_supported_at_the_source(team: Team) -> None:
    odd = TensorDict({"x": torch.ones(1)})
    odd.set_non_tensor("odd", object())
    names = [
        type(error).__name__ for error in team.each(lambda group: group.broadcast(odd if not group.rank else None))
    ]
    assert names == [NotSupportedError.__name__, "TransferAbortedError"]


@pytest.mark.parametrize(("rank", "shown"), [(3, 3), (-1, 0), (True, 0), (1 << 40, 0), ("x", 0), (None, 0)])
def test_describe_rank_when_it_is_none_then_zero(rank: Any, shown: int) -> None:
    assert describe_rank(rank) == shown


def test_spec_of_when_there_is_none_then_a_bug() -> None:
    with pytest.raises(LocalProtocolError):
        get_spec(Agreed())
