from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.content.read_content import Content
from tdserve.client.weights.module_destination import ModuleDestination
from tdserve.messages.content import read_layout
from tdserve.structure.captures.capture import capture
from tests.errors import raises


def policy(width: int = 4) -> nn.Module:
    """Parameters, buffers, a frozen one and a shared one."""
    module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    module[2].weight.requires_grad_(False)
    module.add_module("tied", module[0])
    return module


def content_of(module: nn.Module) -> Content:
    """Returns content as it comes from the server."""
    captured = capture(TensorDict.from_module(module).data)
    return Content(captured.spec, captured.tensors, {}, 1)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_finish_when_the_module_fits_then_filled_and_everything_else_of_it_stays() -> None:
    source, target = policy(), policy()
    optimizer = torch.optim.Adam([each for each in target.parameters() if each.requires_grad])
    target(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    before = {name: (id(each), each.requires_grad, each.grad) for name, each in target.named_parameters()}
    moments = {key: value["exp_avg"].clone() for key, value in optimizer.state.items()}
    destination, content = ModuleDestination(target, store="w"), content_of(source)
    destination.check(content.spec)
    destination.finish(content, was_direct=False)
    assert all(torch.equal(*pair) for pair in zip(state(target).values(), state(source).values(), strict=True))
    assert {name: (id(each), each.requires_grad, each.grad) for name, each in target.named_parameters()} == before
    assert all(torch.equal(optimizer.state[key]["exp_avg"], value) for key, value in moments.items())


def test_places_when_on_the_cpu_then_the_parameters_own_memory() -> None:
    module = policy()
    destination, content = ModuleDestination(module, store="w"), content_of(module)
    places = destination.find_places(read_layout(content.spec, is_packed=True))
    assert places is not None
    mine = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    assert {tensor.data_ptr() for tensor in places.tensors} == mine


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module: setattr(module, "2", nn.Linear(4, 5)), "2.bias"),
        (lambda module: module[1].register_buffer("more", torch.ones(1)), "1.more"),
        (lambda module: delattr(module, "2"), "2.bias"),
        (lambda module: setattr(module[2], "bias", nn.Parameter(torch.ones(3).long(), requires_grad=False)), "2.bias"),
    ],
)
def test_check_when_a_parameter_does_not_fit_then_error_names_it_as_the_module_does(change: object, name: str) -> None:
    module = policy()
    assert callable(change)
    change(module)
    before = state(module)
    with pytest.raises(SpecMismatchError) as caught:
        ModuleDestination(module, store="w").check(content_of(policy()).spec)
    assert caught.value.fields["key"] == name
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(module).items())


def with_buffer(*, is_persistent: bool) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("more", torch.ones(2), persistent=is_persistent)
    return module


@pytest.mark.parametrize(
    ("published", "module", "text"),
    [
        (
            nn.Linear(2, 2),
            with_buffer(is_persistent=False),
            r"'more'.*a non-persistent buffer of the module; publish the",
        ),
        (
            nn.Linear(2, 2),
            with_buffer(is_persistent=True),
            r"'more'.*a buffer of the module; publish a module that has",
        ),
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2), r"'bias'.*a parameter of the module; publish a module that has"),
        (
            with_buffer(is_persistent=False),
            nn.Linear(2, 2),
            r"'more'.*which the published version has, got no parameter",
        ),
        (nn.Linear(2, 2), nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}), r"torch\.compile adds .*module\._orig_mod"),
        (nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}), nn.Linear(2, 2), r"torch\.compile adds .*module\._orig_mod"),
    ],
    ids=["non-persistent", "persistent", "parameter", "published", "compiled module", "compiled publisher"],
)
def test_check_when_one_side_lacks_a_name_then_error_has_the_side_and_the_remedy(
    published: nn.Module, module: nn.Module, text: str
) -> None:
    with pytest.raises(SpecMismatchError, match=text):
        ModuleDestination(module, store="w").check(content_of(published).spec)


def test_destination_when_a_buffer_is_on_the_meta_device_then_error_has_its_name_and_the_remedy() -> None:
    module = with_buffer(is_persistent=True)
    module.more = torch.ones(2, device="meta")
    with pytest.raises(NotSupportedError, match=r"weights 'w' into 'more' .*module\.to_empty"):
        ModuleDestination(module, store="w")
    module.to_empty(device="cpu")
    ModuleDestination(module, store="w").check(content_of(module).spec)


def test_check_when_there_are_values_too_then_error() -> None:
    spec = capture(TensorDict({**TensorDict.from_module(nn.Linear(2, 2)).data, "note": "text"}, [])).spec
    with raises(SpecMismatchError, key="note"):
        ModuleDestination(nn.Linear(2, 2), store="w").check(spec)


@pytest.mark.gpu
def test_finish_when_the_module_is_on_a_gpu_then_filled_there() -> None:
    source, target = policy(), policy().cuda()
    destination, content = ModuleDestination(target, store="w"), content_of(source)
    destination.check(content.spec)
    assert destination.find_places(read_layout(content.spec, is_packed=True)) is None
    destination.finish(content, was_direct=False)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(state(target).values(), state(source).values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_finish_when_numbers_are_of_another_dtype_then_converted_as_load_state_dict_does(dtype: torch.dtype) -> None:
    source, target = policy().to(dtype), policy()
    destination, content = ModuleDestination(target, store="w"), content_of(source)
    destination.check(content.spec)
    assert destination.find_places(read_layout(content.spec, is_packed=True)) is None
    destination.finish(content, was_direct=False)
    expected = policy()
    expected.load_state_dict(source.state_dict())
    assert all(torch.equal(*pair) for pair in zip(state(target).values(), state(expected).values(), strict=True))


def deep(num_layers: int = 40) -> nn.Sequential:
    """A module with so many parameters that their look-up is cached."""
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))


def fill_with(source: nn.Module, target: nn.Module) -> None:
    """Fills a module as a pull does that cannot be received in place."""
    destination, content = ModuleDestination(target, store="w"), content_of(source)
    destination.check(content.spec)
    destination.finish(content, was_direct=False)


def test_check_when_a_known_module_fits_no_more_then_error_and_when_it_fits_again_filled() -> None:
    source, target = deep(), deep()
    fill_with(source, target)
    replaced = target[7].weight
    target[7].weight = nn.Parameter(torch.ones(3, 4))
    with raises(SpecMismatchError, key="7.weight"):
        fill_with(source, target)
    target[7].weight = replaced
    target[3].weight.data = target[3].weight.data.half()  # the same parameter, elsewhere and of another dtype
    target[5].bias = nn.Parameter(torch.zeros(3))
    fill_with(source, target)
    assert target[3].weight.dtype is torch.float16
    target[3].weight.data = target[3].weight.data.float()
    fill_with(source, target)
    assert all(torch.equal(*pair) for pair in zip(state(target).values(), state(source).values(), strict=True))


@pytest.mark.parametrize("num_layers", [2, 40])
def test_finish_when_a_graph_of_the_module_is_alive_then_backward_is_refused(num_layers: int) -> None:
    target = deep(num_layers)
    loss = target(torch.ones(2, 3)).sum()
    fill_with(deep(num_layers), target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as after load_state_dict
        loss.backward()
