from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.client.weights.publication import MAX_KNOWN_SPECS, MIN_ANNOUNCED_LEAVES, Published
from tdserve.server.open_store.specs import MIN_KEPT
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.structure.captures.capture import capture


def test_publish_when_of_a_module_then_its_parameters_come_back(client: tdserve.Client, name: str) -> None:
    policy, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert client.publish(name, policy, metadata={"step": 10, "tags": ["a"]}) == 1
    found = client.latest(name)
    assert found is not None
    assert found.metadata == {"step": 10, "tags": ["a"]}
    found.data.to_module(other)
    assert torch.equal(other.weight, policy.weight)


@pytest.mark.parametrize("as_given", [dict, lambda state: state], ids=["dict", "OrderedDict"])
def test_publish_when_given_a_state_dict_then_refused_by_what_to_give(
    client: tdserve.Client, name: str, as_given: Callable[[Any], Any]
) -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    state = module.state_dict()
    with pytest.raises(InvalidRequestError, match=r"publish\(name, module\).*TensorDict\(state_dict\)"):
        client.publish(name, as_given(state))
    assert client.publish(name, TensorDict(state)) == 1
    found = client.latest(name)
    assert found is not None
    module.load_state_dict(found.data.to_dict())


def many(value: float, *, width: int = 20_000) -> TensorDict:
    """Returns so many large leaves that their next version is announced."""
    entries = {f"k{number:02}": torch.full((width,), value) for number in range(MIN_ANNOUNCED_LEAVES)}
    return TensorDict(entries, [])


def changed(td: TensorDict) -> None:
    """The same object, of another structure."""
    td["k03"] = td["k03"].double()


def check(client: tdserve.Client, name: str, td: TensorDict) -> None:
    """The newest version is what this is now."""
    found = client.latest(name)
    assert found is not None
    assert (found.data == td).all()
    assert found.data["k03"].dtype == td["k03"].dtype


def test_publish_when_it_was_announced_then_what_it_holds_now_is_published(client: tdserve.Client, name: str) -> None:
    td = many(1.0)
    client.publish(name, td)
    for value in (2.0, 3.0):
        td.zero_().add_(value)
        td["k05"] = torch.full_like(td["k05"], -value)  # another tensor, of the same structure
        client.publish(name, td)
        check(client, name, td)
    assert [each.version for each in client.versions(name)] == [2, 3]


def test_publish_when_another_structure_was_announced_then_published_over_another_session(
    remote_client: tdserve.Client, name: str
) -> None:
    td = many(1.0)
    remote_client.publish(name, td)
    session = remote_client.session(remote_client.make_deadline(None))
    changed(td)
    remote_client.publish(name, td)
    check(remote_client, name, td)
    another = remote_client.session(remote_client.make_deadline(None))
    assert another is not session
    td["k03"] = td["k03"].float()
    remote_client.publish(name, td)  # nothing of this name is announced any more
    check(remote_client, name, td)
    assert remote_client.session(remote_client.make_deadline(None)) is another


def test_publish_when_what_was_announced_cannot_travel_then_refused_and_the_version_before_stays(
    remote_client: tdserve.Client, name: str
) -> None:
    td = many(1.0)
    remote_client.publish(name, td)
    before = td.clone()
    td["k07"] = td["k07"].to_sparse()
    with pytest.raises(NotSupportedError, match="k07"):
        remote_client.publish(name, td)
    check(remote_client, name, before)
    td["k07"] = torch.ones(20_000)
    remote_client.publish(name, td)
    check(remote_client, name, td)


def test_published_when_asked_for_something_else_then_nothing_is_known_of_it() -> None:
    published, td = Published(), many(1.0, width=1)
    spec = capture(td).spec
    published.keep("w", td, "", spec, announced=None)
    assert published.take("v", td, "") is None
    assert published.take("w", td, "") is spec
    assert published.take("w", td, "") is None  # until it is kept again
    for other, dtype in ((td.clone(), ""), (td, "bfloat16")):
        published.keep("w", td, "", spec, announced=spec)
        assert published.take("w", other, dtype) is None


def test_published_when_another_structure_was_announced_then_no_more_is_of_this_name() -> None:
    published, td = Published(), many(1.0, width=1)
    spec = capture(td).spec
    changed(td)
    published.keep("w", td, "", capture(td).spec, announced=spec)
    published.keep("w", td, "", capture(td).spec, announced=None)
    assert published.take("w", td, "") is None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_publish_when_structures_come_and_go_then_neither_end_keeps_them_all(tmp_path: Path, transport: Any) -> None:
    with tdserve.Server(tmp_path / "root") as server, server.client(transport=transport) as client:
        for width in range(1, 201):
            client.publish("policy", TensorDict({"w": torch.zeros(width)}, []), keep=1)
        assert len(client.session(Deadline.after(20.0)).known_specs) == MAX_KNOWN_SPECS
        assert client.publish("policy", TensorDict({"w": torch.ones(1)}, [])) == 201  # one that both have forgotten
        weights = client.latest("policy")
        assert weights is not None
        assert weights.data["w"].tolist() == [1.0]
    with CatalogDB(tmp_path / "root" / "catalog") as db:
        assert db.count_records("specs") <= MIN_KEPT
