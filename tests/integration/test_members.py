"""Members of a lazy stack with different keys replace others, and come out as they went in: with their parameters,
buffers, locks and nested tensors, whichever call writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from tensordict.nn import TensorDictParams

import tdserve
from tests.integration.conftest import FreshServer
from tests.sameness import assert_same

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")]

ROWS = 3
"""Rows that a member has, and members that a stack has."""


def jagged(*sizes: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.rand(size) for size in sizes], layout=layout)


def member(**entries: Any) -> TensorDict:
    return TensorDict({"x": torch.rand(ROWS, 2), **entries}, [ROWS])


def everything() -> TensorDict:
    """A member with every key of another member, because a store has only the keys that it was made with."""
    n = TensorDict({"y": torch.rand(ROWS)}, [ROWS])
    return member(w=torch.rand(ROWS, 3), n=n, t=jagged(3, 1, 2), v="word", rows=n.clone())


MEMBERS: dict[str, Callable[[], Any]] = {
    "Parameter": lambda: member(w=torch.nn.Parameter(torch.rand(ROWS, 3))),
    "Buffer": lambda: member(w=torch.nn.Buffer(torch.rand(ROWS, 3))),
    "TensorDictParams": lambda: TensorDictParams(member(w=torch.rand(ROWS, 3))),
    "requires grad": lambda: member(w=torch.rand(ROWS, 3, requires_grad=True)),
    "locked": lambda: member().lock_(),
    "locked in part": lambda: member(n=TensorDict({"y": torch.rand(ROWS)}, [ROWS]).lock_()),
    "jagged": lambda: member(t=jagged(1, 2, 3)),
    "strided": lambda: member(t=jagged(1, 2, 3, layout=torch.strided)),
    "a value for each": lambda: member(v=NonTensorStack(*["same"] * ROWS)),
    "lazy": lambda: lazy_stack([TensorDict({"x": torch.rand(2)}) for _ in range(ROWS)]),
    "lazy in part": lambda: member(rows=lazy_stack([TensorDict({"y": torch.rand(())}) for _ in range(ROWS)])),
    "plain": member,
}


def around(members: list[Any], dim: int) -> TensorDict:
    """A tensordict of two dimensions around a stack along the first, or of one dimension around a stack along the
    second."""
    stack: Any = LazyStackedTensorDict(*members, stack_dim=dim)
    depth = 1 if dim else 2
    return (
        TensorDict({"s": stack, "other": torch.rand(ROWS)}, stack.batch_size[:1])
        if depth == 1
        else (TensorDict({"s": stack, "other": torch.rand(ROWS, ROWS)}, stack.batch_size))
    )


def first(dim: int, *, is_marked: bool = False) -> TensorDict:
    """What a store is made of."""
    made = MEMBERS["Parameter"]() if is_marked else member()
    return around([made, everything(), member()], dim)


def _send(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client.send(td, name)


def _init_remote(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client.init_remote(td, name, exists_ok=True)


def _memmap(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client.memmap(td, name, exists_ok=True)


def _assign(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client[name][...] = td


def _set(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client[name].set("s", td["s"])
    client[name].set_("other", td["other"])


def _set_at(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client[name].set_at_("s", td["s"], slice(None))
    client[name]["other"] = td["other"]


def _update(client: tdserve.Client, name: str, td: TensorDict) -> None:
    client[name].update_({"s": td["s"], "other": td["other"]})


WRITES = (_send, _init_remote, _memmap, _assign, _set, _set_at, _update)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("is_marked", [False, True])
def test_members_when_sent_over_others_then_come_out_as_they_went_in(
    client: tdserve.Client, name: str, kind: str, dim: int, is_marked: bool
) -> None:
    client.init_remote(first(dim, is_marked=is_marked), name)
    td = around([MEMBERS[kind](), member(), everything()], dim)
    client.send(td, name)
    assert_same(client.from_remote_init(name), td)
    client.send(first(dim), name)
    assert not client[name]["s"].tensordicts[0].is_locked


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dim", [0, 1])
def test_members_when_written_by_any_call_then_come_out_as_they_went_in(
    client: tdserve.Client, name: str, write: Callable[..., None], dim: int
) -> None:
    client.init_remote(first(dim), name)
    td = around([MEMBERS["jagged"](), MEMBERS["Parameter"](), MEMBERS["locked in part"]()], dim)
    write(client, name, td)
    assert_same(client[name].to_tensordict(), td)
    assert_same(client.load_memmap(name), td)


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("index", [1, slice(1, 2), [1], torch.arange(ROWS) == 1])
def test_member_when_a_row_is_written_over_another_then_comes_out_as_it_went_in(
    client: tdserve.Client, name: str, kind: str, index: Any
) -> None:
    td, given = first(0), around([member(), MEMBERS[kind](), member()], 0)
    client.init_remote(td, name)
    store = client[name]
    store[index] = given[index]
    assert_same(store[index], given[index])
    found = store["s"].tensordicts
    assert_same(found[0], td["s"].tensordicts[0])
    assert_same(found[1], given["s"].tensordicts[1])
    assert_same(found[2], td["s"].tensordicts[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEMBERS)
def test_rows_when_written_over_rows_of_others_then_come_out_as_they_went_in(
    client: tdserve.Client, name: str, kind: str
) -> None:
    more = [TensorDict({"x": torch.rand(2 * ROWS, 2), **each}, [2 * ROWS]) for each in ({}, {"v": "word"})]
    stack: Any = LazyStackedTensorDict(*more, _twice(everything()), stack_dim=1)
    client.init_remote(TensorDict({"s": stack, "other": torch.rand(2 * ROWS)}, [2 * ROWS]), name)
    store = client[name]
    given = around([MEMBERS[kind](), member(), everything()], 1)
    store[2:5] = given
    assert_same(store[2:5], given)
    for row in range(ROWS):
        assert_same(store[2 + row]["s"][1], given[row]["s"][1])
    found = store["s"]
    assert (found.batch_size, len(found.tensordicts)) == (torch.Size([2 * ROWS, ROWS]), ROWS)
    assert torch.equal(found.tensordicts[1]["x"][2:5], given["s"].tensordicts[1]["x"])
    assert torch.equal(found.tensordicts[1]["x"][:2], more[1]["x"][:2])


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [31, 200])
def test_members_when_they_have_many_rows_then_come_out_as_they_went_in(
    client: tdserve.Client, name: str, num_rows: int
) -> None:
    def made(**entries: Any) -> TensorDict:
        members = [TensorDict({key: torch.rand(num_rows, 2)}, [num_rows]) for key in "ab"]
        members[0].update(entries)
        stack: Any = LazyStackedTensorDict(*members, stack_dim=1)
        return TensorDict({"s": stack}, [num_rows])

    client.init_remote(made(), name)
    td = made(b=torch.nn.Parameter(torch.rand(num_rows, 2)))
    client.send(td, name)
    assert_same(client.from_remote_init(name), td)
    client[name][1:30] = made()[1:30]
    assert_same(client[name][0:30]["s"].tensordicts[1], client[name]["s"].tensordicts[1][0:30])


def test_element_when_written_into_a_member_that_replaced_another_then_the_member_stays_what_it_is(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote(first(0), name)
    store = client[name]
    given = around([member(), MEMBERS["Parameter"](), MEMBERS["jagged"]()], 0)
    store[1:3] = given[1:3]
    one = TensorDict({"x": torch.zeros(2), "w": torch.ones(3)})
    store[1, 0] = TensorDict({"s": one, "other": torch.tensor(0.0)})
    store[2, 0] = TensorDict({"s": TensorDict({"x": torch.zeros(2), "t": torch.ones(4)}), "other": torch.tensor(0.0)})
    weight, tokens = store[1]["s"]["w"], store[2]["s"]["t"]
    assert isinstance(weight, torch.nn.Parameter)
    assert torch.equal(weight[0], torch.ones(3))
    assert [len(component) for component in tokens.unbind()] == [4, 2, 3]
    store[1, 0] = TensorDict({"s": TensorDict({"x": torch.zeros(2)}), "other": torch.tensor(0.0)})
    assert isinstance(store[1]["s"], LazyStackedTensorDict), "no longer rows of one structure"


def test_rows_when_plain_and_of_other_keys_then_are_written_as_before(client: tdserve.Client, name: str) -> None:
    client.init_remote(first(0), name)
    store = client[name]
    row = TensorDict({"s": TensorDict({"x": torch.rand(ROWS, 2), "v": "a"}, [ROWS]), "other": torch.rand(ROWS)}, [ROWS])
    store[0] = row
    assert_same(store[0], row)


def test_members_when_none_has_elements_then_the_same_are_taken_and_others_refused_by_name(
    client: tdserve.Client, name: str
) -> None:
    def nothing(**entries: Any) -> TensorDict:
        members = [TensorDict({"x": torch.rand(0), **entries}, [0]), TensorDict({"y": torch.rand(0)}, [0])]
        stack: Any = LazyStackedTensorDict(*members, stack_dim=1)
        return TensorDict({"s": stack}, [0])

    client.init_remote(nothing(), name)
    client.send(nothing(), name)
    with pytest.raises(tdserve.SpecMismatchError, match="key 's'"):
        client.send(nothing(y=torch.nn.Parameter(torch.rand(0))), name)
    assert_same(client.from_remote_init(name), nothing())


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEMBERS)
def test_stack_when_added_under_a_new_key_then_comes_out_as_it_went_in(
    client: tdserve.Client, name: str, kind: str
) -> None:
    store = client.memmap(TensorDict({"other": torch.rand(ROWS)}, [ROWS]), name)
    stack: Any = LazyStackedTensorDict(MEMBERS[kind](), everything(), stack_dim=1)
    store.set("s", stack)
    assert_same(store["s"], stack)


@pytest.mark.slow
def test_members_when_the_server_starts_again_then_others_read_them_as_they_were_written(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    td = around([MEMBERS["jagged"](), MEMBERS["Parameter"](), MEMBERS["locked in part"]()], 1)
    server = fresh_server(tmp_path / "root")
    with server.client(transport="gloo") as client:
        client.init_remote(first(1), "store")
        client.send(td, "store")
    server.shutdown()
    server = fresh_server(tmp_path / "root")
    for transport in ("shm", "gloo"):
        with server.client(transport=transport) as client:
            assert_same(client.from_remote_init("store"), td)


def _twice(td: TensorDict) -> TensorDict:
    """Returns its rows and some others; nested tensors cannot be concatenated."""
    rows: Any = torch.cat([td.exclude("t"), td.exclude("t")])
    return TensorDict({**dict(rows.items()), "t": jagged(3, 1, 2, 3, 1, 2)}, [2 * ROWS])
