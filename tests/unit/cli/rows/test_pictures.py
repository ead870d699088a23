"""tdserve/cli/rows/pictures.py: images among rows, as PNG files."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.cli.rows.first_rows import iter_columns
from tdserve.cli.rows.head import write_images
from tdserve.cli.rows.pictures import encode_png, find_pixels
from tests.errors import raises


def read_png(content: bytes) -> Any:
    """Returns the pixels of a PNG without filters, and checks all of its sums."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        body = content[at + 4 : at + 8 + length]
        assert zlib.crc32(body) == struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0]
        chunks[body[:4]], at = body[4:], at + 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 2: 3}[color]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_png_when_encoded_then_has_the_pixels(channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 17, channels), dtype=np.uint8)
    assert (read_png(encode_png(pixels)) == pixels).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84), (84, 84, 1)),
        ((84, 96, 3), (84, 96, 3)),
        ((84, 96, 4), (84, 96, 3)),
        ((3, 84, 96), (84, 96, 3)),
        ((4, 84, 96), (84, 96, 1)),
        ((1, 84, 96), (84, 96, 1)),
        ((2_000, 1_000, 3), (500, 250, 3)),
        ((4, 4, 3), None),
        ((84,), None),
        ((9, 84, 84), None),
    ],
)
def test_pixels_when_an_array_looks_like_an_image_then_height_width_channels(shape: Any, expected: Any) -> None:
    found = find_pixels(np.zeros(shape, np.uint8), max_side=512)
    assert (None if found is None else found.shape) == expected
    assert found is None or max(found.shape) <= 512


def test_pixels_when_of_another_dtype_then_no_image() -> None:
    assert find_pixels(np.zeros((84, 84), np.float32)) is None


def test_images_when_rows_have_some_then_a_file_each(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (2, 3, 16, 12), dtype=torch.uint8)
    rows = TensorDict({"obs": pixels, "nested": {"../mask": pixels[:, 0]}, "x": torch.zeros(2, 16, 12)}, [2])
    written = write_images(iter_columns(rows), tmp_path / "made")
    names = ["obs-0.png", "obs-1.png", "nested...%2Fmask-0.png", "nested...%2Fmask-1.png"]
    assert sorted(path.name for path in written) == sorted(names)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted(names)
    found = read_png((tmp_path / "made" / "obs-1.png").read_bytes())
    assert (found == pixels[1].permute(1, 2, 0).numpy()).all()


def test_images_when_the_folder_is_a_file_then_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    with raises(InvalidRequestError, argument="--images"):
        write_images([], tmp_path / "file")
