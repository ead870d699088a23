"""Bad input gives a typed error with the offending values. Nothing is written, and all others are served on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.messages.content import RESERVED_KEYS
from tests.errors import raises
from tests.integration.conftest import example

pytestmark = pytest.mark.integration


def without(key: Any, num_rows: int = 4) -> TensorDict:
    return example(num_rows).exclude(key)


def with_leaf(key: Any, value: torch.Tensor) -> TensorDict:
    return example(len(value)).set(key, value)


MISFITS: dict[str, tuple[TensorDict, str, str]] = {
    "missing key": (without("x"), "x", "no such key"),
    "missing nested key": (without(("n", "y")), "y", "no such key"),
    "unknown key": (with_leaf("other", torch.zeros(4)), "other", "no such key"),
    "shape": (with_leaf("x", torch.zeros(4, 2)), "x", r"float32\[4, 2\]"),
    "dtype": (with_leaf("x", torch.zeros(4, 3).double()), "x", r"float64\[4, 3\]"),
    "nested dtype": (with_leaf(("n", "y"), torch.zeros(4)), "y", r"float32\[4\]"),
    "kind": (with_leaf("n", torch.zeros(4)), "n", "TensorDict"),
    "batch size": (example(4).reshape(2, 2), "", r"\[2, 2\]"),
}

misfit = pytest.mark.parametrize(("td", "key", "message"), list(MISFITS.values()), ids=list(MISFITS))

misfit_of_rows = pytest.mark.parametrize(
    ("td", "key", "message"), [MISFITS[name] for name in MISFITS if "missing" not in name]
)
"""What rows may lack is written later."""


@misfit
def test_send_when_td_does_not_fit_then_names_key_expected_and_actual(
    client: tdserve.Client, store: Any, td: TensorDict, key: str, message: str
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.send(td, store.name),
        lambda: client.recv(td.clone(), store.name),
        lambda: client.from_remote_init(store.name, out=td.clone()),
        lambda: client.init_remote(td, store.name, exists_ok=True),
    ]
    for call in calls:
        with pytest.raises(tdserve.SpecMismatchError, match=message) as raised:
            call()
        assert raised.value.store == store.name
        assert key in raised.value.key


@misfit_of_rows
def test_extend_when_batch_does_not_fit_then_names_key_expected_and_actual(
    replay: Any, td: TensorDict, key: str, message: str
) -> None:
    for early in (False, True):
        with pytest.raises(tdserve.SpecMismatchError, match=message) as raised:
            replay.extend(td, return_early=early)
        assert raised.value.store == replay.name
        assert key in raised.value.key


WRONG_WRITES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "key": (lambda store: store.set_("z", torch.zeros(4)), tdserve.KeyNotFoundError, "z"),
    "nested key": (lambda store: store.set_(("n", "z"), torch.zeros(4)), tdserve.KeyNotFoundError, "z"),
    "key of update": (lambda store: store.update_({"z": torch.zeros(4)}), tdserve.KeyNotFoundError, "z"),
    "key of td": (lambda store: store.update_(with_leaf("z", torch.zeros(4))), tdserve.KeyNotFoundError, "z"),
    "shape of a new key": (lambda store: store.set("z", torch.zeros(3)), tdserve.TDServeError, "z"),
    "key type": (lambda store: store.set(3, torch.zeros(4)), tdserve.InvalidRequestError, "3"),
    "shape": (lambda store: store.set("x", torch.zeros(4, 2)), tdserve.SpecMismatchError, r"\[4, 2\]"),
    "shape of rows": (
        lambda store: store.set_at_("x", torch.zeros(3, 3), [0, 1]),
        tdserve.SpecMismatchError,
        r"\[3, 3\]",
    ),
    "dtype": (lambda store: store.set("x", torch.zeros(4, 3).int()), tdserve.SpecMismatchError, "int32"),
    "text": (lambda store: store.set("x", "text"), tdserve.SpecMismatchError, "str"),
    "td for a leaf": (lambda store: store.set("x", example()), tdserve.SpecMismatchError, "TensorDict"),
    "part of a part": (lambda store: store.set("n", TensorDict({}, [4])), tdserve.SpecMismatchError, "y"),
    "object": (lambda store: store.__setitem__(0, object()), tdserve.SpecMismatchError, "object"),
    "td of other rows": (lambda store: store.__setitem__(slice(0, 2), example(3)), tdserve.SpecMismatchError, r"\[3\]"),
    "td dtype": (lambda store: store.__setitem__(0, example()[0].double()), tdserve.SpecMismatchError, "float64"),
    "index": (lambda store: store.__setitem__(4, example()[0]), tdserve.SelectionError, "4"),
    "sparse": (lambda store: store.set("x", torch.zeros(4, 3).to_sparse()), tdserve.NotSupportedError, "x"),
    "meta": (lambda store: store.set("x", torch.zeros(4, 3, device="meta")), tdserve.NotSupportedError, "x"),
}


@pytest.mark.parametrize(("write", "error", "message"), list(WRONG_WRITES.values()), ids=list(WRONG_WRITES))
def test_handle_when_written_wrongly_then_typed_error(store: Any, write: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        write(store)


@pytest.mark.parametrize("index", [4, -5, [0, 4], torch.ones(3, dtype=torch.bool), 1.5, slice(0, 4, 0)], ids=str)
def test_handle_when_index_does_not_fit_then_selection_error_shows_it(store: Any, index: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store[index],
        lambda: store.get_at("x", index),
        lambda: store.update_at_(example(), index),
    ]
    for call in calls:
        with pytest.raises(tdserve.SelectionError, match=store.name) as raised:
            call()
        assert isinstance(raised.value, IndexError)


def test_keys_when_unknown_then_key_error_names_store_and_key(client: tdserve.Client, store: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store["z"],
        lambda: store["n", "z"],
        lambda: store["x", "y"],
        lambda: client.from_remote_init(store.name, keys=["z"]),
        lambda: client.from_remote_init(store.name, keys=["x", ("n", "z")]),
    ]
    for call in calls:
        with pytest.raises(tdserve.KeyNotFoundError, match=store.name) as raised:
            call()
        assert isinstance(raised.value, KeyError)


def test_store_when_unknown_then_not_found_names_it(client: tdserve.Client) -> None:
    for call in (
        lambda: client["nowhere"],
        lambda: client.delete("nowhere"),
        lambda: client.describe("nowhere"),
        lambda: client.keys("nowhere"),
        lambda: client.send(example(), "nowhere"),
        lambda: client.from_remote_init("nowhere", timeout_s=0),
        lambda: client.recv(example(), "nowhere", timeout_s=0),
        lambda: client.replay("nowhere", timeout_s=0),
    ):
        with pytest.raises(tdserve.StoreNotFoundError) as raised:
            call()
        assert raised.value.name == "nowhere"
    with raises(tdserve.DeadlineExceededError, name="nowhere"):
        client.from_remote_init("nowhere", timeout_s=0.05)
    assert "nowhere" not in client


@pytest.mark.parametrize("bad", ["", "a/b", "..", ".", "../x", "x" * 300, "a\\b", "a\0b", " a", ".hidden", "\ud800", 5])
def test_store_name_when_it_is_invalid_then_invalid_request_has_the_reason(client: tdserve.Client, bad: Any) -> None:
    before = client.stores()
    for call in (
        lambda: client.init_remote(example(), bad),
        lambda: client.memmap_like(example(), bad),
        lambda: client.create_replay(bad, example()[0], 4),
        lambda: client.publish(bad, example()),
        lambda: client.send(example(), bad),
        lambda: client.recv(example(), bad, timeout_s=0),
        lambda: client.describe(bad),
        lambda: client.from_remote_init(bad, timeout_s=0),
        lambda: client.delete(bad),
        lambda: client.latest(bad, timeout_s=0),
    ):
        with raises(tdserve.InvalidRequestError, argument="store name"):
            call()
    assert bad not in client
    assert client.stores() == before


def test_call_when_name_and_tensordict_are_exchanged_then_invalid_request(client: tdserve.Client) -> None:
    for call in (
        lambda: client.init_remote("a", example()),
        lambda: client.send("a", example()),
        lambda: client.recv("a", example(), timeout_s=0),
        lambda: client.publish(example(), "a"),
        lambda: client.create_replay(example()[0], "a", 4),
        lambda: client.latest(example(), timeout_s=0),
        lambda: client.replay(example(), timeout_s=0),
        lambda: client.from_remote_init(example(), out="a", timeout_s=0),
    ):
        with pytest.raises(tdserve.InvalidRequestError, match="TensorDict was given, not a str"):
            call()


def test_store_when_it_exists_then_error_names_it_and_it_stays(client: tdserve.Client, store: Any) -> None:
    other = example() * 2
    for call in (
        lambda: client.init_remote(other, store.name),
        lambda: client.memmap(other, store.name),
        lambda: client.memmap_like(other, store.name),
        lambda: client.create_replay(store.name, other[0], 4),
        lambda: client.create_replay(store.name, other[0], 4, exists_ok=True),
        lambda: client.memmap_like(example(5), store.name, exists_ok=True),
    ):
        with pytest.raises(tdserve.StoreExistsError) as raised:
            call()
        assert raised.value.name == store.name


def test_store_when_of_another_kind_then_wrong_state_names_the_kind(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.create_replay(name, example()[0], 4)
    weights = f"w-{name}"[:100]
    client.publish(weights, example())
    for call in (
        lambda: client.send(example(), name),
        lambda: client.recv(example(), name),
        lambda: client.from_remote_init(name),
        lambda: client.publish(name, example()),
        lambda: client.latest(name),
    ):
        with pytest.raises(tdserve.WrongStateError, match="replay"):
            call()
    for call in (
        lambda: client[weights],
        lambda: client.send(example(), weights),
        lambda: client.replay(weights),
        lambda: client.from_remote_init(weights),
    ):
        with pytest.raises(tdserve.WrongStateError, match="weights"):
            call()
    client.delete(weights)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1"])
def test_timeout_when_it_is_no_time_then_invalid_request(client: tdserve.Client, store: Any, timeout_s: Any) -> None:
    for call in (
        lambda: client.from_remote_init(store.name, timeout_s=timeout_s),
        lambda: client.describe(store.name, timeout_s=timeout_s),
        lambda: client.latest(store.name, timeout_s=timeout_s),
        lambda: store.get("x", timeout_s=timeout_s),
        lambda: tdserve.connect(client.address, timeout_s=timeout_s),
    ):
        with raises(tdserve.InvalidRequestError, argument="timeout_s"):
            call()


def test_publish_when_metadata_is_no_dict_then_invalid_request(client: tdserve.Client, name: str) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="metadata: a int is not a dict"):
        client.publish(name, example(), metadata=5)  # type: ignore[arg-type]
    assert name not in client


@pytest.mark.parametrize("newer_than", ["1", 1.5, True], ids=repr)
def test_newer_than_when_it_is_no_version_then_invalid_request(
    client: tdserve.Client, store: Any, newer_than: Any
) -> None:
    with raises(tdserve.InvalidRequestError, argument="newer_than"):
        client.recv(example(), store.name, newer_than=newer_than)
    with raises(tdserve.InvalidRequestError, argument="newer_than"):
        client.latest(store.name, newer_than=newer_than)


def test_newer_than_when_beyond_all_versions_then_nothing_newer(client: tdserve.Client, store: Any, name: str) -> None:
    assert client.recv(example(), store.name, newer_than=10**30, timeout_s=0) is None
    weights = f"{name}-weights"
    client.publish(weights, example())
    assert client.latest(weights, newer_than=10**30, timeout_s=0) is None
    client.delete(weights)


@pytest.mark.parametrize("device", ["nonsense", 1.5], ids=repr)
def test_device_when_torch_has_none_such_then_invalid_request(client: tdserve.Client, store: Any, device: Any) -> None:
    for call in (
        lambda: tdserve.connect(client.address, device=device),
        lambda: client.from_remote_init(store.name, device=device),
    ):
        with raises(tdserve.InvalidRequestError, argument="device"):
            call()


@pytest.mark.parametrize("keep", [-1, 1.5, "2"])
def test_publish_when_keep_cannot_be_then_invalid_request(client: tdserve.Client, name: str, keep: Any) -> None:
    with raises(tdserve.InvalidRequestError, argument="keep"):
        client.publish(name, example(), keep=keep)
    assert name not in client


WRONG_REPLAYS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative capacity": ({"capacity": -1}, tdserve.InvalidRequestError, "capacity: -1"),
    "no capacity": ({"capacity": 0}, tdserve.InvalidRequestError, "capacity: 0"),
    "fraction": ({"capacity": 2.5}, tdserve.InvalidRequestError, "capacity: 2.5"),
    "absurd": ({"capacity": 2**60}, Exception, "capacity|room"),
    "min size": ({"capacity": 4, "min_size": 5}, tdserve.InvalidRequestError, "5"),
    "negative min size": ({"capacity": 4, "min_size": -1}, tdserve.InvalidRequestError, "-1"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), list(WRONG_REPLAYS.values()), ids=list(WRONG_REPLAYS))
def test_create_replay_when_a_number_cannot_be_then_invalid_request(
    client: tdserve.Client, name: str, arguments: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        client.create_replay(name, example()[0], **arguments)
    assert isinstance(raised.value, tdserve.TDServeError)
    assert name not in client


@pytest.mark.parametrize("key", RESERVED_KEYS)
def test_create_replay_when_like_has_a_key_of_samples_then_refused(client: tdserve.Client, name: str, key: str) -> None:
    with pytest.raises(tdserve.InvalidSpecError, match=key):
        client.create_replay(name, example()[0].set(key, torch.tensor(1)), 4)
    assert name not in client


def test_replay_when_numbers_cannot_be_then_typed_errors(replay: Any) -> None:
    for num_rows in (0, -1, 2.5, True, "4"):
        with raises(tdserve.InvalidRequestError, argument="num_rows"):
            replay.sample(num_rows)
        with raises(tdserve.InvalidRequestError, argument="num_rows"):
            replay.batches(num_rows)
    replay.set_limiter(tdserve.SampleToInsertRatio(1.0, min_size=1, error_buffer=100))
    with pytest.raises(tdserve.TooLargeError, match="asked 9, there are never more than 8") as raised:
        replay.extend(example(9))
    assert isinstance(raised.value, tdserve.CapacityError)
    assert (raised.value.free, raised.value.retryable) == (8, False)


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "sparse": lambda: TensorDict({"bad": torch.zeros(2).to_sparse()}, []),
    "object": lambda: TensorDict({}, []).set_non_tensor("bad", object()),
    "range": lambda: TensorDict({}, []).set_non_tensor("bad", range(2)),
    "deep object": lambda: TensorDict({}, []).set_non_tensor("bad", {"k": [lambda: None]}),
}


@pytest.mark.parametrize("make", list(UNSUPPORTED.values()), ids=list(UNSUPPORTED))
def test_leaf_when_unsupported_then_error_names_its_key_and_nothing_is_made(
    client: tdserve.Client, name: str, make: Callable[[], Any]
) -> None:
    for call in (client.init_remote, client.memmap, client.memmap_like):
        with pytest.raises(tdserve.NotSupportedError, match="bad"):
            call(make(), name)
    with pytest.raises(tdserve.NotSupportedError, match="bad"):
        client.create_replay(name, make(), 4)
    with pytest.raises(tdserve.NotSupportedError, match="bad"):
        client.publish(name, make())
    assert name not in client


@pytest.mark.parametrize("what", [3, None, "text", torch.zeros(2), [{"x": torch.zeros(2)}], TensorDict])
def test_init_remote_when_it_is_no_tensordict_then_typed_error(client: tdserve.Client, name: str, what: Any) -> None:
    with pytest.raises(tdserve.RequestError):
        client.init_remote(what, name)
    assert name not in client
