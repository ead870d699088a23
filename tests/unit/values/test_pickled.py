from __future__ import annotations

from typing import Any

import pytest
import torch

from tdserve.base.errors import NotSupportedError
from tdserve.values.pickled import dump, load


class Broken:
    """Raises an error of its own when it is pickled."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("no")


def test_object_when_pickled_then_comes_back_equal() -> None:
    assert load(dump({1, 2})) == {1, 2}


@pytest.mark.parametrize("value", [lambda: 0, Broken(), (each for each in (1,))])
def test_object_when_it_cannot_be_pickled_then_key_is_named(value: Any) -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        dump(value, key="my key")


@pytest.mark.parametrize("content", [b"", b"abc", b"cno_such_module\nName\n.", dump({1})[:-3]])
def test_pickle_when_it_cannot_be_read_then_key_is_named(content: bytes) -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        load(content, key="my key")


BASE = torch.arange(10_000.0).view(100, 100)
VIEWS = {
    "row": BASE[3],
    "column": BASE[:, 3],
    "one": BASE[3, 3],
    "none": BASE[:0],
    "every other": BASE[::2, ::2],
    "repeated": BASE[3].expand(1000, 100),
    "windows": BASE.view(-1)[:50].unfold(0, 40, 1),
    "with a gradient": (BASE[3] * 1).requires_grad_()[:7],
    "complex": torch.view_as_complex(BASE.view(-1, 2))[:5].conj(),
}


@pytest.mark.parametrize("view", list(VIEWS.values()), ids=list(VIEWS))
def test_view_when_pickled_then_without_the_rest_of_its_storage(view: torch.Tensor) -> None:
    content = dump([view])
    (found,) = load(content)
    assert torch.equal(found, view)
    assert found.requires_grad == view.requires_grad
    assert found.untyped_storage().nbytes() <= view.numel() * view.element_size()
    assert len(content) < 16_000


def test_parameter_when_a_view_then_without_the_rest_and_a_parameter_again() -> None:
    found = load(dump(torch.nn.Parameter(BASE[3], requires_grad=False)))
    assert type(found) is torch.nn.Parameter
    assert (found.untyped_storage().nbytes(), found.requires_grad) == (400, False)


def test_module_when_its_weights_are_views_then_without_the_rest() -> None:
    module = torch.nn.Linear(100, 1)
    module.weight.data = BASE[3:4]
    assert torch.equal(load(dump({"m": module}))["m"].weight, module.weight)
    assert len(dump({"m": module})) < 16_000


@pytest.mark.parametrize("tensor", [torch.zeros(3), BASE[3]], ids=["whole", "view"])
def test_tensor_when_a_value_has_it_twice_then_one_again(tensor: torch.Tensor) -> None:
    found = load(dump({"x": tensor, "y": [tensor]}))
    assert found["x"] is found["y"][0]


def test_tensor_when_of_another_kind_then_pickled_as_by_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([BASE[0], BASE[1, :3]], layout=torch.jagged)
    found = load(dump([sparse, nested, torch.zeros(2, device="meta"), torch.zeros(3).expand(5, 3)]))
    assert torch.equal(found[0].to_dense(), torch.eye(3))
    assert [each.shape for each in found[1].unbind()] == [(100,), (3,)]
    assert (found[2].is_meta, found[3].stride()) == (True, (0, 1))
