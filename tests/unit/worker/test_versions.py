from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError, RemoteProtocolError, TransferAbortedError
from tdserve.control.status import decode_failure
from tdserve.messages.content import read_layout, write_layout
from tdserve.store.weights.version_marks import begin_marks
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import WIRE
from tdserve.structure.trees.version_subset import convert_floats, encode_numbers, select_leaves
from tdserve.transport.sources_sinks import LeafBuffers
from tdserve.transport.stream import pack, start_send, unpack
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.worker.peer import TIMEOUT_S, Peer, receive

TD = TensorDict({"w": torch.rand(300, 1000), "b": torch.arange(5)}, [])
CAPTURED = capture(TD)
LAYOUT = write_layout(CAPTURED.spec)
LEAVES = [CAPTURED.tensors[slot.path] for slot in LAYOUT.slots]
INLINE = control_pb2.Content(inline=pack(LAYOUT.messages, LeafBuffers(LEAVES)))


def ref(path: Path) -> worker_pb2.VersionRef:
    """Returns the reference by which an order names a version."""
    spec = codec.encode(CAPTURED.spec)
    return worker_pb2.VersionRef(path=str(path), fingerprint=CAPTURED.spec.fingerprint, spec=spec)


def test_receive_when_inline_then_a_file_that_others_can_read(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    peer.done(receive_version=worker_pb2.ReceiveVersion(version=ref(path), content=INLINE))
    assert torch.equal(load_file(path)["w"], TD["w"])
    assert torch.equal(load_file(path)["b"], TD["b"])


def test_receive_when_over_the_channel_then_straight_into_the_file_and_out_again(peer: Peer, tmp_path: Path) -> None:
    peer.open_channel()
    path = tmp_path / "1.safetensors"
    content = control_pb2.Content(message_nbytes=LAYOUT.message_nbytes)
    order = worker_pb2.ReceiveVersion(version=ref(path), content=content)
    peer.put(worker_pb2.Order(tag=1, receive_version=order))
    peer.channel.wait_all(
        start_send(peer.channel, 1, LAYOUT.messages, LeafBuffers(LEAVES), peer.context.pool), TIMEOUT_S
    )
    assert peer.next_report().HasField("done")
    peer.put(worker_pb2.Order(tag=2, is_accepted=True, send_version=worker_pb2.SendVersion(version=ref(path))))
    layout = read_layout(CAPTURED.spec)
    messages = receive(peer, layout.message_nbytes, 2)
    found = [*map(torch.zeros_like, LEAVES), torch.zeros(8, dtype=torch.int64)]
    unpack(b"".join(message.numpy().tobytes() for message in messages), layout.messages, LeafBuffers(found))
    assert all(map(torch.equal, found, LEAVES))
    assert peer.next_report().HasField("done")


def test_receive_when_the_content_is_too_short_then_no_version_is_seen(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    order = worker_pb2.ReceiveVersion(version=ref(path), content=control_pb2.Content(inline=b"short"))
    assert isinstance(peer.error(receive_version=order), RemoteProtocolError)
    assert not path.exists()


def test_send_when_the_file_is_damaged_then_reported_not_served(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    peer.done(receive_version=worker_pb2.ReceiveVersion(version=ref(path), content=INLINE))
    with path.open("r+b") as file:
        file.truncate(1000)
    error = peer.error(send_version=worker_pb2.SendVersion(version=ref(path), inline=True))
    assert isinstance(error, CorruptDataError)


def test_send_when_another_store_has_the_folder_by_now_then_aborted(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    peer.done(receive_version=worker_pb2.ReceiveVersion(version=ref(path), content=INLINE))
    begin_marks(tmp_path, uid="later")
    wanted = worker_pb2.SendVersion(version=ref(path), inline=True)
    wanted.version.uid = "later"
    assert peer.done(send_version=wanted).inline
    wanted.version.uid = "earlier"
    number = peer.put(worker_pb2.Order(send_version=wanted))
    assert peer.next_report().HasField("channel_lost")
    report = peer.next_report()
    assert (report.order, type(decode_failure(report.failure))) == (number, TransferAbortedError)


def test_send_when_the_file_is_gone_then_the_error_names_it(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    peer.done(receive_version=worker_pb2.ReceiveVersion(version=ref(path), content=INLINE))
    path.unlink()
    error = peer.error(send_version=worker_pb2.SendVersion(version=ref(path), inline=True))
    assert error.fields["path"] == str(path)


@pytest.mark.parametrize("numbers", [[], [0], [1]])
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_send_when_only_some_leaves_are_wanted_or_in_another_dtype_then_these(
    peer: Peer, tmp_path: Path, numbers: list[int], dtype: str
) -> None:
    path = tmp_path / "1.safetensors"
    peer.done(receive_version=worker_pb2.ReceiveVersion(version=ref(path), content=INLINE))
    wanted = worker_pb2.SendVersion(version=ref(path), inline=True, leaves=encode_numbers(numbers))
    wanted.dtype = WIRE.get(dtype, 0)  # type: ignore[assignment]
    worked = peer.done(send_version=wanted)
    layout = read_layout(select_leaves(convert_floats(CAPTURED.spec, dtype), numbers), is_packed=True)
    found = [torch.zeros(slot.shape, dtype=to_torch(slot.dtype)) for slot in layout.slots]
    unpack(worked.inline, layout.messages, LeafBuffers(found))
    for slot, leaf in zip(layout.slots[: layout.num_leaves], found, strict=False):
        assert torch.equal(leaf, CAPTURED.tensors[slot.path].to(to_torch(slot.dtype)))
    assert len(found) == len(numbers) + 1
