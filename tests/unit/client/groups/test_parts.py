from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.groups.member_parts import GivenPart, TakenPart, compute_fingerprint, divide_messages
from tdserve.client.groups.reducing import Reducing
from tdserve.structure.captures.capture import capture
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import copy_bytes
from tests.group_members import LARGE, SMALL, content, number_in


def given(td: TensorDict) -> GivenPart:
    return GivenPart(td, name="g", allow_pickle=False)


def move(source: GivenPart, taken: TakenPart) -> object:
    """Returns a tensordict after its bytes were copied from one end to the other."""
    source_end, sink = source.make_source(), taken.make_sink(source.spec, source.values_nbytes, BufferPool())
    for message in source.messages:
        staging = torch.empty(message.nbytes, dtype=torch.uint8)
        source_end.fill(message, staging)
        place = sink.find_memory(message)
        if place is None:
            sink.drain(message, staging)
        else:
            copy_bytes(place, staging)
    return taken.finish(source.spec)


@pytest.mark.parametrize("num_floats", [SMALL, LARGE])
@pytest.mark.parametrize("into", [None, 3])
def test_content_when_moved_then_built_or_filled(num_floats: int, into: int | None) -> None:
    out = None if into is None else content(into, num_floats)
    found = move(given(content(8, num_floats)), TakenPart(out, name="g", allow_pickle=False))
    assert out is None or found is out
    assert number_in(found, num_floats) == 8


def test_content_when_leaves_are_not_contiguous_then_copied_in_and_out() -> None:
    source = TensorDict({"x": torch.arange(12.0).view(3, 4).T})
    out = TensorDict({"x": torch.zeros(4, 6)[:, ::2]})
    move(given(source), TakenPart(out, name="g", allow_pickle=False))
    assert torch.equal(out["x"], source["x"])


def test_fingerprint_when_devices_differ_then_the_same() -> None:
    on_cpu = capture(TensorDict({"x": torch.zeros(3)}, device="cpu")).spec
    anywhere = capture(TensorDict({"x": torch.zeros(3)})).spec
    assert on_cpu.fingerprint != anywhere.fingerprint
    assert compute_fingerprint(on_cpu) == compute_fingerprint(anywhere)


def test_check_when_structures_differ_then_names_the_key() -> None:
    spec = capture(TensorDict({"x": torch.zeros(3)})).spec
    for part in (
        given(TensorDict({"x": torch.ones(4)})),
        TakenPart(TensorDict({"x": torch.ones(4)}), name="g", allow_pickle=False),
    ):
        with pytest.raises(SpecMismatchError) as raised:
            part.check(spec)
        assert raised.value.key == "x"
    TakenPart(None, name="g", allow_pickle=False).check(spec)


def test_check_device_when_a_tensor_lies_elsewhere_then_not_supported() -> None:
    part = given(TensorDict({"n": {"x": torch.ones(4)}}))
    part.check_device(None)
    part.check_device(torch.device("cpu"))
    with pytest.raises(NotSupportedError, match=r"'n', 'x'.*on cpu in a group with backend 'nccl'.*cuda:1"):
        part.check_device(torch.device("cuda", 1))
    out = TakenPart(TensorDict({"x": torch.ones(4)}), name="g", allow_pickle=False)
    with pytest.raises(NotSupportedError):
        out.check_device(torch.device("cuda", 0))


@pytest.mark.parametrize("into", [None, 3])
def test_tensors_on_when_a_device_takes_them_then_the_values_come_apart(into: int | None) -> None:
    source = given(content(4))
    out = None if into is None else content(into)
    taken = TakenPart(out, name="g", allow_pickle=False)
    for target, tensor in zip(taken.make_tensors(torch.device("cpu"), source.spec), source.tensors, strict=True):
        target.copy_(tensor)
    sink = taken.make_values_sink(source.values_nbytes, BufferPool())
    for message in divide_messages(source.spec, source.values_nbytes):
        if not message.parts:
            staging = torch.empty(message.nbytes, dtype=torch.uint8)
            source.make_values_source().fill(message, staging)
            sink.drain(message, staging)
    found = taken.finish(source.spec)
    assert number_in(found) == 4
    assert found is out or found.device == torch.device("cpu")


def test_tensors_on_when_out_is_a_lazy_stack_then_its_members_are_filled() -> None:
    source = given(TensorDict({"x": torch.arange(6.0).view(2, 3)}, [2]))
    members = [TensorDict({"x": torch.zeros(3)}, []) for _ in range(2)]
    taken = TakenPart(lazy_stack(members), name="g", allow_pickle=False)
    taken.check(source.spec)
    for target, tensor in zip(taken.make_tensors(torch.device("cpu"), source.spec), source.tensors, strict=True):
        target.copy_(tensor)
    taken.make_values_sink(0, BufferPool())
    taken.finish(source.spec)
    assert [member["x"].tolist() for member in members] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_parts_when_content_is_refused_then_error_names_the_group() -> None:
    sparse = TensorDict({"a": torch.eye(2).to_sparse()}, [])
    with pytest.raises(NotSupportedError, match=r"key 'a' of group 'g'"):
        given(sparse)
    with pytest.raises(NotSupportedError, match=r"key 'v' of group 'g'"):
        given(TensorDict({}, []).set_non_tensor("v", object()))
    with pytest.raises(NotSupportedError, match=r"of group 'g'"):
        TakenPart(TensorDict({"a": torch.ones(1).expand(3)}, []), name="g", allow_pickle=False)
    with pytest.raises(NotSupportedError, match=r"key 'a' of group 'g'"):
        Reducing(sparse, "sum", name="g")


def test_parts_when_a_structure_differs_then_error_names_the_group_and_the_key() -> None:
    mine, other = TensorDict({"a": torch.ones(2)}, []), capture(TensorDict({"a": torch.ones(3)}, [])).spec
    parts = given(mine), TakenPart(mine, name="g", allow_pickle=False), Reducing(mine, "sum", name="g")
    for part in parts:
        with pytest.raises(SpecMismatchError, match=r"^key 'a': expected .*\(group 'g'\), got ") as caught:
            part.check(other)
        assert caught.value.fields["key"] == "a"
