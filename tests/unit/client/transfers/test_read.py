from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidSpecError, NotSupportedError, SpecMismatchError
from tdserve.client.content.read_content import Destination, drop_extra, on_cpu
from tdserve.client.transfers.download import post_known_size
from tdserve.client.transfers.read import finish_known_size
from tdserve.messages.content import make_rows_layout
from tdserve.messages.layout import Layout
from tdserve.rules.tags import make_tag
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2

TD = TensorDict({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3), "t": "text"}, [3])


def test_on_cpu_when_the_store_was_on_a_gpu_then_what_is_read_is_not() -> None:
    plain = capture(TD).spec
    assert on_cpu(plain) is plain
    assert on_cpu(plain.with_device("cuda:0")).root.device == "cpu"
    assert on_cpu(plain.with_device("cpu")).root.device == "cpu"


def test_places_when_leaves_are_contiguous_then_theirs() -> None:
    out = TD.clone()
    layout = Layout.from_spec(capture(TD).spec)
    places = Destination(out, store="x").find_places(layout)
    assert places is not None
    assert [place.data_ptr() for place in places.tensors] == [out[slot.path[0]].data_ptr() for slot in layout.slots]


def test_places_when_a_leaf_is_a_strided_view_then_none() -> None:
    out = TensorDict({"a": torch.zeros(2, 3).T}, [3])
    assert Destination(out, store="x").find_places(Layout.from_spec(capture(out).spec)) is None


def test_check_when_it_does_not_fit_then_error_names_store_and_key() -> None:
    with pytest.raises(SpecMismatchError) as raised:
        Destination(TD.clone().exclude("b"), store="x").check(capture(TD).spec)
    assert (raised.value.store, raised.value.key) == ("x", "b")


def test_places_for_when_it_fits_then_its_leaves_else_the_error() -> None:
    spec = capture(TD).spec
    out = TD.clone()
    places, mismatch = Destination(out, store="x").match_places(spec, Layout.from_spec(spec))
    assert places is not None
    assert (places.tensors[0].data_ptr(), mismatch) == (out["a"].data_ptr(), None)
    places, mismatch = Destination(out.exclude("b"), store="x").match_places(spec, Layout.from_spec(spec))
    assert places is None
    assert isinstance(mismatch, SpecMismatchError)


def test_destination_when_rows_share_memory_then_refused() -> None:
    with pytest.raises((NotSupportedError, InvalidSpecError, SpecMismatchError)):
        Destination(TensorDict({"a": torch.zeros(1, 2).expand(3, 2)}, [3]), store="x")


@pytest.mark.parametrize("num_live", [0, 100])
def test_finish_posted_when_nothing_is_granted_now_then_none_else_the_content(
    remote_client: tdserve.Client, name: str, num_live: int
) -> None:
    client = remote_client  # a local client copies rows, and waits for nothing
    rows = TensorDict({"a": torch.ones(100, 300)}, [100])
    replay = client.create_replay(name, rows[0], 100)
    replay.extend(rows[:num_live])
    deadline, stored = Deadline.after(20.0), replay.spec.prepend((100,))
    session, request, layout = client.session(deadline), client.requests.take_number(), make_rows_layout(stored, 100)
    asked = control_pb2.SampleRequest(
        store=name, num_rows=100, fingerprint=stored.fingerprint, message_nbytes=layout.message_nbytes
    )
    pending = session.send(request, content_channel=session.contents.current, sample=asked)
    posted = post_known_size(layout, session, pending, make_tag(request), client.pool)
    content = finish_known_size(session, pending, posted, spec=stored, layout=layout, deadline=deadline)
    assert (content is None) == (num_live == 0)
    assert content is None or torch.equal(content.columns.get_leaves()[("a",)], rows["a"])


def test_read_when_into_a_strided_view_then_filled_all_the_same(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    out = TensorDict({"a": torch.zeros(2, 3).T, "b": torch.zeros(3, dtype=torch.int64), "t": "old"}, [3])
    client.recv(out, name)
    assert torch.equal(out["a"], TD["a"])
    assert out["t"] == "text"


def test_only_when_rows_are_stored_as_a_whole_then_the_keys_that_were_asked_for() -> None:
    rows = lazy_stack([TensorDict({"x": torch.ones(2), "y": torch.ones(1)}), TensorDict({"x": torch.ones(1)})])
    spec = capture(rows).spec
    assert list(drop_extra(rows, [("x",)], spec)[0].keys()) == ["x"]
    assert drop_extra(rows, [], spec) is rows
    assert drop_extra(TD, [("b",)], capture(TD).spec) is TD
