"""Moves content to a device through pinned staging memory, in the background.

A GPU copies by itself only from pinned memory. Received content is put into slots of such memory, piece by piece; each
piece is copied while the next slot is filled, and a slot is reused once its copy is done. The copies run on a stream of
their own. The stream that uses the result waits for them on the device; no thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Condition
from typing import Any, Protocol

import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.structure.tensors.torch_types import view_bytes

SLOT_NBYTES = 8 * 1024 * 1024
"""Large enough that a copy takes many times what it takes to begin it, small enough to be pinned in milliseconds."""

MAX_SLOTS = 4
"""Pinned memory is lost to all other programs: 32 MiB per process and device. Two slots would do for one thread."""

ALIGN_NBYTES = 256
"""Alignment of CUDA's own allocator: kernels read aligned tensors in wider steps."""


class CopyEvent(Protocol):
    """A copy under way, with the methods of ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Returns whether the copy is done."""

    def synchronize(self) -> Any:
        """Waits until the copy is done."""


class Device(Protocol):
    """A device to which copies are made in the background, in the order of the calls."""

    device: torch.device

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 memory that the device can copy from by itself."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 memory on the device, to copy to."""

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> CopyEvent:
        """Starts to copy; neither memory may be touched until the copy is done."""

    def join(self, copied: CopyEvent, memory: torch.Tensor) -> None:
        """Makes later work of the calling thread on the device wait for the copy.

        The memory is not reused before that work is
        done."""


class CudaDevice:
    """A CUDA device, with a stream of its own. Threads: safe.

    Args:
        device: With its number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Returns pinned memory."""
        with torch.inference_mode(False):  # it is used again, in any mode
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory of the copying stream, which reuses it only after its previous use."""
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> CopyEvent:
        """Starts to copy on the copying stream."""
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return copied

    def join(self, copied: Any, memory: torch.Tensor) -> None:
        """Makes the caller's current stream wait."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        memory.record_stream(current)  # else the next copy reuses it as soon as the caller drops it


class Upload:
    """A tensordict that is being moved to a device.

    Args:
        make: Returns the tensordict; called in the thread that takes it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def take(self) -> Any:
        """Returns the tensordict for use on the caller's current stream.

        The stream waits for the copy, the caller does not.
        """
        return self._make()


@dataclass
class _Slot:
    """Staging memory, and the last copy from it."""

    memory: torch.Tensor
    copied: CopyEvent | None = None

    @property
    def is_idle(self) -> bool:
        return self.copied is None or self.copied.query()


class Uploads:
    """Uploads to one device, from any number of threads.

    Args:
        device: The device.
        slot_nbytes: Size of one slot of staging memory.
        max_slots: Largest number of slots; they are made when needed.
    """

    def __init__(self, device: Device, *, slot_nbytes: int = SLOT_NBYTES, max_slots: int = MAX_SLOTS) -> None:
        self._device = device
        self._slot_nbytes = slot_nbytes
        self._max_slots = max_slots
        self._changed = Condition()
        self._free: list[_Slot] = []  # the one unused for longest is first
        self._num_slots = 0

    def begin(self, td: Any) -> Upload:
        """Starts to copy a tensordict or tensorclass instance, which may change as soon as this returns.

        Tensors that are not dense ones on the CPU are moved later, when the result is taken, as by ``td.to``. They must
        not change before.
        """
        device = self._device.device
        found: dict[int, torch.Tensor] = {}
        td.apply(lambda leaf: found.setdefault(id(leaf), leaf))
        staged = [leaf for leaf in found.values() if _is_staged(leaf)]
        offsets, nbytes = _compute_offsets([leaf.nbytes for leaf in staged])
        memory = self._device.allocate(nbytes)
        copied = self._copy([_view_as_bytes(leaf) for leaf in staged], offsets, memory)
        moved = {id(leaf): _view(memory, leaf, offset) for leaf, offset in zip(staged, offsets, strict=True)}
        is_all = len(moved) == len(found)

        def place(leaf: torch.Tensor) -> torch.Tensor:
            there = moved.get(id(leaf))
            return leaf.to(device) if there is None else there

        placed = td.apply(place, device=device) if is_all else None

        def take() -> Any:
            if copied is not None:
                self._device.join(copied, memory)
            # Other tensors are moved by the thread that takes the result: memory belongs to the stream on which it was
            # made.
            return placed if is_all else td.apply(place, device=device)

        return Upload(take)

    def _copy(self, leaves: Sequence[torch.Tensor], offsets: Sequence[int], memory: torch.Tensor) -> CopyEvent | None:
        """Copies all leaves to their offsets; returns the last copy, after which all are done."""
        copied = None
        for begin, end, pieces in _split_windows([leaf.numel() for leaf in leaves], offsets, self._slot_nbytes):
            slot = self._take()
            try:
                for number, start, stop, at in pieces:
                    slot.memory[at : at + stop - start].copy_(leaves[number][start:stop])
                copied = slot.copied = self._device.copy(memory[begin:end], slot.memory[: end - begin])
            finally:
                self._give(slot)
        return copied

    def _take(self) -> _Slot:
        """Returns a slot whose last copy is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._num_slots < self._max_slots)
            slot = next((slot for slot in self._free if slot.is_idle), None)
            if slot is None and self._num_slots == self._max_slots:
                slot = self._free[0]
            if slot is None:
                self._num_slots += 1
            else:
                self._free.remove(slot)
        if slot is None:
            try:
                return _Slot(self._device.allocate_staging(self._slot_nbytes))
            except BaseException:
                self._give(None)
                raise
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot

    def _give(self, slot: _Slot | None) -> None:
        """Returns a slot to the pool; None: it could not be made."""
        with self._changed:
            if slot is None:
                self._num_slots -= 1
            else:
                self._free.append(slot)
            self._changed.notify()


def resolve_device(device: torch.device | str | int | None) -> torch.device | None:
    """Returns a device with its number: ``"cuda"`` is the current one of the calling thread.

    Raises:
        InvalidRequestError: It names no device.
        NotSupportedError: There is no such CUDA device here.
    """
    if device is None:
        return None
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise InvalidRequestError(argument="device", reason=f"{device!r} is not a device of torch") from fault
    if wanted.type != "cuda":
        return wanted
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_devices:
        raise NotSupportedError(
            feature=f"device {str(wanted)!r}", reason=f"torch finds {num_devices} CUDA devices here"
        )
    return torch.device("cuda", torch.cuda.current_device()) if wanted.index is None else wanted


def begin(td: Any, device: torch.device | str | int | None) -> Upload:
    """Starts to move a tensordict to a device; another thread may take the result.

    Args:
        td: Tensordict or tensorclass instance.
        device: A copy to a CUDA device is made in the background, one to any other as by ``td.to``; None copies
            nothing.

    Raises:
        NotSupportedError: There is no such CUDA device here.
    """
    wanted = resolve_device(device)
    if wanted is None:
        return Upload(lambda: td)
    if wanted.type == "cuda":
        return _get_uploads(wanted).begin(td)
    moved = td.to(wanted)
    return Upload(lambda: moved)


def choose_arrays(numpy: bool | None, device: Any) -> bool | None:
    """Returns whether a call hands over NumPy arrays; None leaves it to the client's setting.

    Raises:
        InvalidRequestError: Arrays on a device are asked for.
    """
    if device is None:
        return numpy
    if numpy:
        raise InvalidRequestError(argument="numpy", reason=f"NumPy has no arrays on device={device!r}")
    return False


def to_device(td: Any, device: torch.device | str | int | None) -> Any:
    """Moves a tensordict to a device, for use on the caller's current stream: ``begin`` and ``take`` at once."""
    return begin(td, device).take()


@cache
def _get_uploads(device: torch.device) -> Uploads:
    return Uploads(CudaDevice(device))


def _is_staged(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0


def _view_as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    return view_bytes(leaf.detach().resolve_conj().resolve_neg().contiguous())


def _view(memory: torch.Tensor, leaf: torch.Tensor, offset: int) -> torch.Tensor:
    return memory[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)


def _compute_offsets(sizes_nbytes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offset of each leaf in one aligned piece of memory, and the size of that memory."""
    offsets = []
    end = 0
    for nbytes in sizes_nbytes:
        offsets.append(end)
        end += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    return offsets, end


def _split_windows(
    sizes_nbytes: Sequence[int], offsets: Sequence[int], window_nbytes: int
) -> Iterator[tuple[int, int, list[tuple[int, int, int, int]]]]:
    """Divides the memory into windows of at most a slot's size.

    Yields:
        Begin and end within the memory; and for each leaf in that window its number, its first and last byte, and their
        place within the window.
    """
    first = 0
    total = offsets[-1] + sizes_nbytes[-1] if offsets else 0
    for begin in range(0, total, window_nbytes):
        end = min(begin + window_nbytes, total)
        while offsets[first] + sizes_nbytes[first] <= begin:
            first += 1
        pieces = []
        for number in range(first, len(offsets)):
            if offsets[number] >= end:
                break
            start = max(begin - offsets[number], 0)
            stop = min(end - offsets[number], sizes_nbytes[number])
            if start < stop:
                pieces.append((number, start, stop, offsets[number] + start - begin))
        yield begin, end, pieces
