from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import SpecMismatchError
from tdserve.client.content.read_content import Content
from tdserve.client.weights import pulls
from tdserve.client.weights.full_version import take_whole

LARGE = 400_000
"""Elements of a leaf that travels alone."""

LEAVES = ["large", *(f"small{number:02}" for number in range(12))]


def tree(*, has_text: bool = False) -> TensorDict:
    """Returns small leaves that fill more than one message, a large one, and a value if requested."""
    leaves: dict[str, Any] = {key: torch.rand(LARGE if key == "large" else 100_000) for key in LEAVES}
    return TensorDict({**leaves, "text": "new"} if has_text else leaves, [])


def blank(td: TensorDict) -> TensorDict:
    """Returns a tree of the same structure, with zeros and another text."""
    out = td.clone().zero_()
    if "text" in out:
        out["text"] = "old"
    return out


def strided(td: TensorDict) -> TensorDict:
    """Like ``blank``, with a leaf that cannot be received into."""
    return blank(td).update({"large": torch.zeros(2 * LARGE)[::2]})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Content | None]:
    """Records what ``take_whole`` returns, in order."""
    found: list[Content | None] = []

    def take(*arguments: Any, **named: Any) -> Content | None:
        found.append(take_whole(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(pulls, "take_whole", take)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_text", "make", "is_in_place"), [(False, blank, True), (False, strided, False), (True, blank, False)]
)
def test_take_whole_when_into_a_destination_then_filled_and_no_content_where_all_of_it_lies_there(
    remote_client: tdserve.Client, name: str, taken: list[Content | None], has_text: bool, make: Any, is_in_place: bool
) -> None:
    td = tree(has_text=has_text)
    remote_client.publish(name, td)
    out = make(td)
    found = remote_client.latest(name, out=out)
    assert found is not None
    assert found.data is out
    assert all(torch.equal(out[key], td[key]) for key in LEAVES)
    assert not has_text or out["text"] == "new"
    assert [content is None for content in taken] == [is_in_place]


def test_take_whole_when_there_is_no_destination_then_the_content(
    remote_client: tdserve.Client, name: str, taken: list[Content | None]
) -> None:
    td = tree(has_text=True)
    remote_client.publish(name, td)
    found = remote_client.latest(name)
    assert found is not None
    assert found.data["text"] == "new"
    (content,) = taken
    assert content is not None
    assert all(torch.equal(content.leaves[path], td[path]) for path in content.leaves)


@pytest.mark.slow
def test_take_whole_when_the_destination_does_not_fit_then_it_is_unchanged_and_the_next_pull_gets_its_own(
    remote_client: tdserve.Client, name: str
) -> None:
    td = tree()
    remote_client.publish(name, td)
    other = blank(td).update({"large": torch.zeros(LARGE + 1)})
    with pytest.raises(SpecMismatchError, match="large"):
        remote_client.latest(name, out=other)
    assert not any(bool(leaf.any()) for leaf in other.values())
    out = blank(td)
    remote_client.latest(name, out=out)
    assert all(torch.equal(out[key], td[key]) for key in LEAVES)
