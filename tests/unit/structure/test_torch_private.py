from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tdserve.structure import torch_private as module
from tests.house import parse
from tests.private_names import all_private_names

NESTED: Any = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
with FakeTensorMode():
    FAKE_PARAMETER: Any = torch.nn.Parameter(torch.zeros(1))

NAMES: list[tuple[Any, str]] = [
    (torch, "_functorch"),
    (torch, "_guards"),
    (torch, "_subclasses"),
    (torch, "_C"),
    (torch, "_foreach_copy_"),
    (torch.nested, "_internal"),
    (torch.utils, "_pytree"),
    (torch._C, "_AutoDispatchBelowADInplaceOrView"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_functorch"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_disabled_torch_function_impl"),
    (torch.Tensor, "_make_wrapper_subclass"),
    (torch.ops.aten, "_to_copy"),
    (NESTED, "_values"),
    (NESTED, "_offsets"),
    (NESTED, "_lengths"),
    (NESTED, "_ragged_idx"),
    (torch.nn.Module(), "_parameters"),
    (torch.nn.Module(), "_buffers"),
    (torch.nn.Module(), "_modules"),
    (torch.nn.Module, "_save_to_state_dict"),
    (torch.nn.Buffer(torch.zeros(1)), "_is_buffer"),
    (FAKE_PARAMETER, "_is_param"),
]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_torch_when_upgraded_then_still_has_the_name(owner: Any, name: str) -> None:
    assert hasattr(owner, name)


def test_names_when_module_is_read_then_all_are_looked_for() -> None:
    used = all_private_names(parse(module.__name__, Path(module.__file__).read_text()))
    assert used == {name for _, name in NAMES}


def test_buffer_when_shown_then_is_one_and_a_parameter_is_none() -> None:
    assert module.is_buffer(torch.nn.Buffer(torch.zeros(1)))
    assert not module.is_buffer(torch.nn.Parameter(torch.zeros(1)))


def test_fake_parameter_when_shown_then_is_one() -> None:
    assert module.is_fake_parameter(FAKE_PARAMETER)


def test_jagged_parts_when_nested_tensor_is_given_then_are_its_values_and_offsets() -> None:
    values, offsets, lengths, ragged_dim = module.jagged_parts(NESTED)
    assert values.shape == (5,)
    assert offsets.tolist() == [0, 2, 5]
    assert (lengths, ragged_dim) == (None, 1)
