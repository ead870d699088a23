from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    SpecMismatchError,
    StoreNotFoundError,
    WrongStateError,
)
from tests.errors import raises

NUM_FLOATS = {"inline": 5, "channel": 40_000}

both_sizes = pytest.mark.parametrize("size", list(NUM_FLOATS))


def weights(number: int, size: str = "inline") -> TensorDict:
    """Floats of more than 16 bits, and content that is not converted."""
    floats = torch.linspace(0, number, NUM_FLOATS[size])
    return TensorDict({"w": floats, "n": {"d": floats.double(), "i": torch.arange(3)}, "note": "text"}, [])


def test_version_when_it_is_kept_then_that_and_not_the_newest(client: tdserve.Client, name: str) -> None:
    for number in range(1, 4):
        client.publish(name, weights(number), metadata={"step": number}, keep=2)
    found = client.version(name, 2)
    assert (found.version, found.metadata) == (2, {"step": 2})
    assert torch.equal(found.data["w"], weights(2)["w"])
    out = weights(0)
    assert client.version(name, 3, out=out).data is out
    assert torch.equal(out["w"], weights(3)["w"])


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 4, 0, -1, 2**70])
def test_version_when_it_is_not_kept_then_error_names_those_that_are(
    client: tdserve.Client, name: str, version: int
) -> None:
    for number in range(1, 4):
        client.publish(name, weights(number))
    with pytest.raises(InvalidRequestError, match=f"version: {version} is not kept; kept now: 2, 3"):
        client.version(name, version)
    with pytest.raises(InvalidRequestError, match=r"1\.5 is not a version"):
        client.version(name, 1.5)  # type: ignore[arg-type]


def test_versions_when_asked_then_those_that_are_kept_ascending_with_what_was_said_of_them(
    client: tdserve.Client, name: str
) -> None:
    for number in range(1, 5):
        client.publish(name, weights(number), metadata={"loss": 1 / number, "tags": ["a"]}, keep=3)
    found = client.versions(name)
    assert [each.version for each in found] == [2, 3, 4]
    assert [each.metadata for each in found] == [{"loss": 1 / number, "tags": ["a"]} for number in (2, 3, 4)]
    assert found[0].created_s <= found[1].created_s <= found[2].created_s
    assert found[0].nbytes == sum(leaf.nbytes for leaf in (weights(1)["w"], weights(1)["n", "d"], weights(1)["n", "i"]))


def test_versions_when_there_are_no_weights_then_error(client: tdserve.Client, name: str) -> None:
    with pytest.raises(StoreNotFoundError):
        client.versions(name, timeout_s=0)
    with pytest.raises(DeadlineExceededError):
        client.versions(name, timeout_s=0.01)
    client.init_remote(weights(1), name)
    with pytest.raises(WrongStateError, match="not hold weights"):
        client.versions(name)
    with pytest.raises(WrongStateError):
        client.version(name, 1)


@pytest.mark.slow
@both_sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("copy", [False, True])
def test_latest_when_a_dtype_is_given_then_floating_point_leaves_have_it(
    client: tdserve.Client, name: str, size: str, dtype: torch.dtype, copy: bool
) -> None:
    expected = weights(3, size)
    client.publish(name, expected)
    found = client.latest(name, dtype=dtype, copy=copy)
    assert found is not None
    assert torch.equal(found.data["w"], expected["w"].to(dtype))
    assert torch.equal(found.data["n", "d"], expected["n", "d"].to(dtype))
    assert torch.equal(found.data["n", "i"], expected["n", "i"])
    assert found.data["note"] == "text"
    again = client.latest(name, copy=copy)
    assert again is not None
    assert torch.equal(again.data["w"], expected["w"])


@both_sizes
def test_latest_when_a_dtype_and_a_place_are_given_then_the_place_has_it(
    client: tdserve.Client, name: str, size: str
) -> None:
    client.publish(name, torch.nn.Linear(NUM_FLOATS[size], 3))
    module = torch.nn.Linear(NUM_FLOATS[size], 3).bfloat16()
    parameter = module.weight
    client.latest(name, into=module, dtype=torch.bfloat16)
    whole = client.latest(name)
    assert whole is not None
    assert torch.equal(parameter, whole.data["weight"].bfloat16())
    assert module.weight is parameter
    client.latest(name, into=module)  # in float32, and converted here
    assert torch.equal(parameter, whole.data["weight"].bfloat16())


@both_sizes
def test_publish_when_a_dtype_is_given_then_that_is_stored(client: tdserve.Client, name: str, size: str) -> None:
    td = weights(2, size)
    client.publish(name, td, dtype=torch.bfloat16)
    assert td["w"].dtype is torch.float32
    found = client.latest(name)
    assert found is not None
    assert torch.equal(found.data["w"], td["w"].bfloat16())
    assert found.data["n", "i"].dtype is torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e5m2, "bfloat16", 3])
def test_calls_when_the_dtype_is_none_of_floating_point_numbers_then_refused(
    client: tdserve.Client, dtype: Any
) -> None:
    for call in (client.latest, client.subscribe):
        with raises(InvalidRequestError, argument="dtype"):
            call("w", dtype=dtype)
    with raises(InvalidRequestError, argument="dtype"):
        client.publish("w", weights(1), dtype=dtype)
    assert "w" not in client


@pytest.mark.parametrize("fanout", [-1, 1 << 32])
def test_publish_when_the_fanout_is_no_count_then_refused(client: tdserve.Client, name: str, fanout: int) -> None:
    with raises(InvalidRequestError, argument="fanout"):
        client.publish(name, weights(1), fanout=fanout)


def test_latest_when_into_a_module_then_its_parameters_are_filled_and_it_is_the_data(
    client: tdserve.Client, name: str
) -> None:
    source, module = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    before = dict(module.named_parameters())
    client.publish(name, source)
    found = client.latest(name, into=module)
    assert found is not None
    assert found.data is module
    assert dict(module.named_parameters()) == before
    assert torch.equal(module.weight, source.weight)
    assert (module.weight.requires_grad, module.bias.requires_grad) == (True, False)


def test_latest_when_a_flat_state_dict_was_published_then_the_error_explains_how_to_nest_it(
    client: tdserve.Client, name: str
) -> None:
    source, module = (torch.nn.Sequential(torch.nn.Linear(3, 2)) for _ in range(2))
    flat = TensorDict(source.state_dict(), [])
    client.publish(name, flat)
    with pytest.raises(SpecMismatchError, match=r"'0\.\w+'.*\('0', '\w+'\).*unflatten_keys"):
        client.latest(name, into=module)
    client.publish(name, flat.unflatten_keys("."))
    client.latest(name, into=module)
    assert torch.equal(module.state_dict()["0.weight"], flat["0.weight"])


def test_latest_when_the_module_does_not_fit_then_error_names_the_parameter_and_nothing_is_written(
    client: tdserve.Client, name: str
) -> None:
    client.publish(name, torch.nn.Sequential(torch.nn.Linear(3, 2)))
    module: Any = torch.nn.Sequential(torch.nn.Linear(4, 2))
    before = module[0].bias.clone()
    with raises(SpecMismatchError, key="0.weight"):
        client.latest(name, into=module)
    assert torch.equal(module[0].bias, before)
    for wrong in ({"out": weights(1), "into": module}, {"into": weights(1)}):
        with raises(InvalidRequestError, argument="into"):
            client.latest(name, **wrong)
