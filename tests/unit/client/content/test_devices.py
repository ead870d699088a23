from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import NonTensorData, TensorClass, TensorDict

from tdserve.base.errors import NotSupportedError
from tdserve.client.content.devices import (
    ALIGN_NBYTES,
    Uploads,
    begin,
    resolve_device,
    to_device,
)
from tests.sameness import difference


class Frame(TensorClass):
    """A tensorclass."""

    pixels: torch.Tensor


class LateCopy:
    """A copy that happens when a caller waits for it, and not before."""

    def __init__(self, device: LateDevice, target: torch.Tensor, staged: torch.Tensor) -> None:
        self._device = device
        self._work: Callable[[], object] | None = lambda: target.copy_(staged)

    def query(self) -> bool:
        """Returns whether the copy is done."""
        return self._work is None

    def synchronize(self) -> None:
        """Makes this copy and those before it."""
        while self._work is not None:
            self._device.under_way.pop(0).run()

    def run(self) -> None:
        """Makes this copy."""
        assert self._work is not None
        self._work()
        self._work = None


class LateDevice:
    """Memory of this process as a device that copies as late as allowed. A caller that fills a slot too early, or uses
    a result without joining, gets wrong content.

    Attributes:
        num_slots: Number of staging buffers that were allocated.
        under_way: Copies that are not made yet, in order.
        joined: Memory that was joined: later work comes after the copies to it.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_slots = 0
        self.under_way: list[LateCopy] = []
        self.joined: list[torch.Tensor] = []

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Returns memory full of garbage."""
        self.num_slots += 1
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory full of garbage."""
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> LateCopy:
        """Remembers a copy."""
        self.under_way.append(LateCopy(self, target, staged))
        return self.under_way[-1]

    def join(self, copied: Any, memory: torch.Tensor) -> None:
        """Makes everything up to this copy."""
        copied.synchronize()
        self.joined.append(memory)


def content(scale: int = 1) -> TensorDict:
    """Returns leaves of many kinds: nested, empty, a view, of odd sizes, complex and conjugate, bool, half."""
    leaves = {
        "pixels": torch.arange(3 * 7 * 5 * scale).view(3, -1).to(torch.uint8),
        "view": torch.arange(12.0).view(4, 3).T,
        "nested": {
            "complex": torch.randn(3, 2, dtype=torch.complex64).conj(),
            "flags": torch.tensor([True, False, True]),
        },
        "nothing": torch.zeros(3, 0),
        "half": torch.ones(3, 1, dtype=torch.bfloat16),
        "text": NonTensorData("prompt", batch_size=[3]),
        "frame": Frame(pixels=torch.arange(3.0), batch_size=[3]),
    }
    return TensorDict(leaves, [3], names=["time"])


def on_cpu(td: TensorDict) -> Any:
    """Returns the expected result of an upload; the device's memory is this process's."""
    return td.apply(lambda leaf: leaf.resolve_conj(), device=torch.device("cpu"))


@pytest.mark.parametrize("slot_nbytes", [1, 13, 256, 1000, 10**6])
def test_upload_when_taken_then_equal_whatever_the_size_of_a_slot(slot_nbytes: int) -> None:
    device = LateDevice()
    td = content()
    placed = Uploads(device, slot_nbytes=slot_nbytes).begin(td).take()
    assert difference(on_cpu(td), placed) is None
    assert placed.device == torch.device("cpu")
    assert placed["nested"].device == torch.device("cpu")
    assert device.under_way == []


def test_upload_when_the_source_changes_behind_it_then_has_what_was_there() -> None:
    td = content()
    expected = td.clone()
    upload = Uploads(LateDevice(), slot_nbytes=64).begin(td)
    td.zero_()
    assert difference(on_cpu(expected), upload.take()) is None


def test_uploads_when_several_are_under_way_then_none_touches_the_others() -> None:
    device = LateDevice()
    uploads = Uploads(device, slot_nbytes=100, max_slots=2)
    contents = [content(scale) for scale in range(1, 6)]
    under_way = [uploads.begin(td) for td in contents]
    assert device.num_slots == 2
    for td, upload in reversed(list(zip(contents, under_way, strict=True))):
        assert difference(on_cpu(td), upload.take()) is None


def test_uploads_when_slots_are_free_again_then_no_more_are_made() -> None:
    device = LateDevice()
    uploads = Uploads(device, slot_nbytes=10**6, max_slots=4)
    for _ in range(5):
        uploads.begin(content()).take()
    assert device.num_slots == 1
    for _ in range(9):
        uploads.begin(content())
    assert device.num_slots == 4


def test_begin_when_a_slot_is_free_then_waits_for_no_copy() -> None:
    device = LateDevice()
    uploads = Uploads(device, slot_nbytes=10**6, max_slots=2)
    uploads.begin(content())
    uploads.begin(content())
    assert len(device.under_way) == 2


def test_take_when_called_then_joins_the_memory_of_the_result() -> None:
    device = LateDevice()
    placed = Uploads(device).begin(content()).take()
    (memory,) = device.joined
    assert placed["pixels"].untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert placed["half"].data_ptr() % ALIGN_NBYTES == memory.data_ptr() % ALIGN_NBYTES


def test_upload_when_a_leaf_is_no_dense_one_then_it_comes_too() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)
    td = TensorDict({"tokens": jagged, "x": torch.ones(2)}, [2])
    placed = Uploads(LateDevice()).begin(td).take()
    assert placed["tokens"].is_nested
    assert torch.equal(placed["tokens"].values(), jagged.values())
    assert torch.equal(placed["x"], td["x"])


def test_upload_when_there_are_rows_of_a_lazy_stack_then_they_come_too() -> None:
    rows = [TensorDict({"x": torch.arange(size)}, []) for size in (2, 4)]
    placed = Uploads(LateDevice()).begin(TensorDict.lazy_stack(rows)).take()
    assert [row["x"].tolist() for row in placed.unbind(0)] == [[0, 1], [0, 1, 2, 3]]


def test_upload_when_there_is_nothing_to_copy_then_nothing_is_asked_of_the_device() -> None:
    device = LateDevice()
    td = TensorDict({"text": NonTensorData("a", batch_size=[2]), "none": torch.zeros(2, 0)}, [2])
    placed = Uploads(device).begin(td).take()
    assert (placed["text"], placed["none"].shape, device.num_slots, device.joined) == ("a", (2, 0), 0, [])


class PunctualDevice(LateDevice):
    """Copies at once, for tests with threads, whose order is undefined."""

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> LateCopy:
        """Makes the copy."""
        copied = LateCopy(self, target, staged)
        copied.run()
        return copied


@pytest.mark.slow
def test_uploads_when_many_threads_share_them_then_each_has_its_own_content() -> None:
    device = PunctualDevice()
    uploads = Uploads(device, slot_nbytes=50, max_slots=2)
    wrong: list[str] = []

    def move(scale: int) -> None:
        td = content(scale)
        for _ in range(20):
            found = difference(on_cpu(td), uploads.begin(td).take())
            if found is not None:
                wrong.append(found)

    threads = [Thread(target=move, args=(scale,), name=f"move-{scale}") for scale in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert device.num_slots <= 2


class NoMemory(LateDevice):
    """A device whose first allocation of staging memory fails."""

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Fails once."""
        if self.num_slots == 0:
            self.num_slots += 1
            raise MemoryError
        return super().allocate_staging(nbytes)


def test_uploads_when_staging_memory_could_not_be_had_then_the_next_one_tries_again() -> None:
    uploads = Uploads(NoMemory(), max_slots=1)
    with pytest.raises(MemoryError):
        uploads.begin(content())
    assert uploads.begin(content()).take()["text"] == "prompt"


class MeasuredDevice(PunctualDevice):
    """Keeps the sizes of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_nbytes: list[int] = []

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> LateCopy:
        """Makes the copy."""
        self.sizes_nbytes.append(target.numel())
        return super().copy(target, staged)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(32, 900))
def test_upload_when_leaves_and_slots_are_of_any_size_then_every_byte_goes_once_and_no_more_than_a_slot_at_a_time(
    sizes_nbytes: list[int], slot_nbytes: int
) -> None:
    device = MeasuredDevice()
    leaves = {f"k{number:02}": torch.arange(nbytes).to(torch.uint8) for number, nbytes in enumerate(sizes_nbytes)}
    placed = Uploads(device, slot_nbytes=slot_nbytes).begin(TensorDict(leaves, [])).take()
    assert all(torch.equal(placed[key], leaf) for key, leaf in leaves.items())
    offsets = [placed[key].data_ptr() - placed["k00"].data_ptr() for key in leaves]
    assert all(offset % ALIGN_NBYTES == 0 for offset in offsets)
    assert sum(device.sizes_nbytes) == offsets[-1] + sizes_nbytes[-1]
    assert max(device.sizes_nbytes) <= slot_nbytes


def test_to_device_when_none_or_no_cuda_device_then_as_tensordict_does() -> None:
    td = content()
    assert to_device(td, None) is td
    assert to_device(td, "cpu").device == torch.device("cpu")
    assert to_device(td, "meta")["pixels"].device == torch.device("meta")


def test_resolve_device_when_no_cuda_device_then_as_torch_reads_it() -> None:
    assert resolve_device(None) is None
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("meta")) == torch.device("meta")


@pytest.mark.gpu
def test_resolve_device_when_no_number_is_given_then_the_current_device() -> None:
    assert resolve_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    assert resolve_device(0) == torch.device("cuda", 0)


def test_to_device_when_the_device_is_not_there_then_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="cuda:99"):
        to_device(content(), "cuda:99")
    with pytest.raises(NotSupportedError, match="cuda:99"):
        begin(content(), 99)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_to_device_when_cuda_then_equal_there(device: Any) -> None:
    td = content(scale=100_000)
    placed = to_device(td, device)
    assert placed.device == placed["frame"].device == torch.device("cuda:0")
    assert difference(on_cpu(td), placed.to("cpu")) is None


@pytest.mark.gpu
def test_to_device_when_taken_on_a_side_stream_again_and_again_then_never_anothers_content() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    uploads = [begin(TensorDict({"x": torch.full((3_000_000,), number)}, []), "cuda") for number in range(4)]
    sums = []
    with torch.cuda.stream(side):
        for number in range(4, 60):
            x = uploads.pop(0).take()["x"]
            for _ in range(20):
                x = x + 0  # keeps the stream busy, so that memory given back too early is overwritten
            sums.append((number - 4, x.max(), x.min()))
            uploads.append(begin(TensorDict({"x": torch.full((3_000_000,), number)}, []), "cuda"))
    torch.cuda.synchronize()
    assert [(int(low), int(high)) for _, low, high in sums] == [(number, number) for number, _, _ in sums]


@pytest.mark.gpu
def test_to_device_when_two_threads_share_a_gpu_then_each_has_its_own_content() -> None:
    wrong: list[int] = []

    def move(value: int) -> None:
        td = TensorDict({"x": torch.full((1_000_000,), value)}, [])
        wrong.extend(value for _ in range(50) if not bool((to_device(td, "cuda")["x"] == value).all()))

    threads = [Thread(target=move, args=(value,), name=f"move-{value}") for value in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
