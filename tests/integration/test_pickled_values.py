"""Objects that only pickle can carry: opaque to the server, for clients that allow it on both ends."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

import tdserve

pytestmark = pytest.mark.integration

NOT_PICKLED = r"'own'.*allow_pickle=True"


@dataclass
class Tool:
    """An object of a user's own class."""

    name: str
    limits: set[int]


@tensorclass
class Call:
    """A tensorclass with a field that is no tensor."""

    tokens: torch.Tensor
    tool: Any


ROWS: list[Any] = [Tool("search", {1, 2}), torch.float32, "plain"]


def rows() -> TensorDict:
    """Three rows: values of their own, and one for all."""
    shared = NonTensorData(Fraction(1, 3), batch_size=[3])
    return TensorDict({"x": torch.arange(3), "own": NonTensorStack(*ROWS), "shared": shared}, [3])


def own(td: Any) -> list[Any]:
    """The values of the rows."""
    found: list[Any] = td["own"].tolist()
    return found


@pytest.fixture(scope="module", params=["gloo", "shm"])
def allowing(server: tdserve.Server, request: pytest.FixtureRequest) -> Iterator[tdserve.Client]:
    """A client that allows pickle."""
    with server.client(transport=request.param, allow_pickle=True, timeout_s=20.0) as client:
        yield client


def test_objects_when_both_ends_allow_pickle_then_come_back_equal(allowing: tdserve.Client, name: str) -> None:
    allowing.init_remote(rows(), name)
    found = allowing.from_remote_init(name)
    assert own(found) == ROWS
    assert found["shared"] == Fraction(1, 3)
    assert [type(value) for value in own(found)] == [Tool, torch.dtype, str]
    store = allowing[name]
    store.set_at_("own", {"a", "b"}, 2)
    assert own(store[1:3]) == [torch.float32, {"a", "b"}]
    out = rows()
    allowing.recv(out, name)
    assert own(out) == [*ROWS[:2], {"a", "b"}]


def test_objects_when_in_a_replay_then_sampled_indexed_and_appended(allowing: tdserve.Client, name: str) -> None:
    replay = allowing.create_replay(name, like=rows()[0], capacity=10)
    replay.extend(rows())
    with replay.writer() as writer:
        writer.append(rows()[1])
    assert own(replay[:]) == [*ROWS, torch.float32]
    assert all(value in ROWS for value in own(replay.sample(8)))


def test_objects_when_published_or_in_a_tensorclass_then_come_back_equal(allowing: tdserve.Client, name: str) -> None:
    make: Any = Call  # the decorator adds batch_size
    call = make(tokens=torch.zeros(2), tool=Tool("calc", {3}), batch_size=[])
    allowing.publish(name, call)
    found = allowing.latest(name)
    assert found is not None
    assert found.data.tool == Tool("calc", {3})


def test_objects_when_a_client_does_not_allow_pickle_then_the_error_names_key_and_remedy(
    allowing: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    allowing.init_remote(rows(), name)
    with server.client(transport=allowing.transport) as other:
        with pytest.raises(tdserve.NotSupportedError, match=NOT_PICKLED):
            other.from_remote_init(name)
        with pytest.raises(tdserve.NotSupportedError, match=NOT_PICKLED):
            other.init_remote(rows(), f"{name}-2"[-100:])
        with pytest.raises(tdserve.NotSupportedError, match=NOT_PICKLED):
            other[name].set_at_("own", range(2), 0)
        assert other.from_remote_init(name, keys=["x"])["x"].tolist() == [0, 1, 2]
        assert f"{name}-2"[-100:] not in other
    assert own(allowing.from_remote_init(name)) == ROWS


def test_entry_when_it_needs_no_pickle_then_other_clients_read_it(
    allowing: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    kv = allowing.create_kv(name)
    kv["plain"] = {"w": torch.ones(2), "n": 1}
    assert kv.get("plain", select="w")["w"].tolist() == [1, 1]
    with server.client(transport=allowing.transport) as other:
        found = other.kv(name)["plain"]
    assert (found["w"].tolist(), found["n"]) == ([1, 1], 1)


def test_client_when_pickled_then_allows_what_it_allowed(allowing: tdserve.Client, name: str) -> None:
    allowing.init_remote(rows(), name)
    with pickle.loads(pickle.dumps(allowing)) as copied:
        assert own(copied.from_remote_init(name)) == ROWS


def test_object_when_it_cannot_be_pickled_then_is_refused_and_its_name_stays_free(
    allowing: tdserve.Client, name: str
) -> None:
    with pytest.raises(tdserve.NotSupportedError, match="'f'"):
        allowing.init_remote(TensorDict({"f": NonTensorData(lambda: 0)}), name)
    allowing.init_remote(rows(), name)


class Armed:
    """Says so when it is unpickled."""

    went_off = False

    def __reduce__(self) -> Any:
        return (_go_off, ())


def _go_off() -> Armed:
    Armed.went_off = True
    return Armed()


def test_object_when_its_pickle_runs_code_then_only_a_reader_that_allowed_it_runs_it(
    allowing: tdserve.Client, server: tdserve.Server, name: str
) -> None:
    allowing.init_remote(TensorDict({"bomb": NonTensorData(Armed())}), name)
    assert not Armed.went_off
    with server.client() as other, pytest.raises(tdserve.NotSupportedError, match="'bomb'"):
        other.from_remote_init(name)
    assert not Armed.went_off
    allowing.from_remote_init(name)
    assert Armed.went_off
    Armed.went_off = False
