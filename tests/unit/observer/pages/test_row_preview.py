"""tdserve/observer/pages/row_preview.py: rows as pictures, histograms, text and chats."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest

from tdserve.observer.pages.row_preview import (
    MAX_IMAGE_SIDE,
    MAX_TEXT,
    encode_png,
    find_chat,
    find_pixels,
    make_histogram,
    shorten,
)


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
    found = find_pixels(np.zeros(shape, np.uint8))
    assert (None if found is None else found.shape) == expected
    assert found is None or max(found.shape) <= MAX_IMAGE_SIDE


def test_pixels_when_of_another_dtype_then_no_image() -> None:
    assert find_pixels(np.zeros((84, 84), np.float32)) is None


def test_histogram_when_numbers_are_odd_then_those_that_are_finite_count() -> None:
    values = np.array([np.nan, np.inf, *range(10)])
    found = make_histogram([values])
    assert found is not None
    assert (found["low"], found["high"], found["mean"], found["num_odd"]) == ("0", "9", "4.5", 2)
    assert max(bar["height"] for bar in found["bars"]) == 40


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros(100)],
        [np.arange(5)],
        [np.array(["a"] * 20)],
        [np.full(20, np.nan)],
        [np.array([-1e308, 1e308] * 9)],
    ],
)
def test_histogram_when_there_is_nothing_to_show_then_none(arrays: Any) -> None:
    assert make_histogram(arrays) is None


def test_chat_when_a_value_is_one_then_role_and_content() -> None:
    assert find_chat([{"role": "user", "content": "hi\nyou\x1b"}]) == [("user", "hi\nyou\\x1b")]
    for value in ([], "user", [{"role": "user"}], [1], {"role": "a", "content": "b"}):
        assert find_chat(value) is None


def test_text_when_long_then_cut_and_its_length_said() -> None:
    assert shorten("x" * (MAX_TEXT + 1)) == "x" * MAX_TEXT + "… (2,001 characters)"
    assert shorten("a\nb") == "a\nb"
