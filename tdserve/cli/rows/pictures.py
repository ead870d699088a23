"""Images among the tensors of rows, and PNG files of them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_array(value: Any) -> NDArray[Any] | None:
    """Returns the numbers of a tensor; None for anything else, or kinds of numbers that NumPy does not have."""
    if not hasattr(value, "detach"):
        return None
    try:
        found: NDArray[Any] = value.detach().cpu().numpy()
    except (TypeError, RuntimeError):
        return None
    return found


def find_pixels(array: NDArray[Any], *, max_side: int | None = None) -> NDArray[np.uint8] | None:
    """Returns an image as height, width and 1 or 3 channels; None if an array does not look like one.

    Args:
        max_side: Lines and columns of a larger image are left out evenly; None keeps all.
    """
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        return None
    if array.ndim == 2:
        array = array[..., None]
    elif array.shape[-1] not in (1, 3, 4):
        if array.shape[0] > 4:
            return None
        array = array.transpose(1, 2, 0)  # channels first, or some frames of one channel
        array = array if array.shape[-1] in (1, 3) else array[..., -1:]
    height, width, channels = array.shape
    if min(height, width) < 8:
        return None
    step = 1 if max_side is None else -(-max(height, width) // max_side)
    shown: NDArray[np.uint8] = np.ascontiguousarray(array[::step, ::step, : 3 if channels >= 3 else 1])
    return shown


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Returns an image as PNG (RFC 2083), without filters."""
    height, width, channels = pixels.shape

    def make_chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    body = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", header) + make_chunk(b"IDAT", body) + make_chunk(b"IEND", b"")
