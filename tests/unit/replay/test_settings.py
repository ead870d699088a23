from __future__ import annotations

from typing import Any

import pytest

from tdserve.errors import InvalidRequestError, NotSupportedError
from tdserve.replay.limiter import MinSize
from tdserve.replay.settings import Settings


def test_json_when_read_back_then_equal_settings_and_equal_text() -> None:
    given = Settings(limiter=MinSize(7))
    assert Settings.from_json(given.to_json()) == given
    assert Settings.from_json(given.to_json()).to_json() == given.to_json()


def test_json_when_written_then_canonical() -> None:
    expected = '{"limiter":{"kind":"min_size","min_size":7},"remover":{"kind":"fifo"},"sampler":{"kind":"uniform"}}'
    assert Settings(limiter=MinSize(7)).to_json() == expected


def test_from_json_when_empty_then_uniform_from_a_ring_with_the_given_size() -> None:
    assert Settings.from_json("", min_size=5) == Settings(limiter=MinSize(5))
    assert Settings.from_json('{"limiter":{"kind":"min_size","min_size":2}}', min_size=5).limiter == MinSize(2)
    assert Settings.from_json('{"limiter":{"kind":"min_size"}}').limiter == MinSize(1)


@pytest.mark.parametrize(
    "text",
    [
        '{"sampler":{"kind":"prioritized"}}',
        '{"remover":{"kind":"lowest_priority"}}',
        '{"limiter":{"kind":"queue"}}',
        '{"sampler":{"kind":"uniform","alpha":1}}',
    ],
)
def test_from_json_when_a_kind_is_unknown_then_not_supported(text: str) -> None:
    with pytest.raises(NotSupportedError):
        Settings.from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"colour":{}}',
        '{"sampler":"uniform"}',
        '{"sampler":{}}',
        '{"sampler":{"kind":1}}',
        "[" * 9999,
        '{"limiter":{"kind":"min_size","min_size":0}}',
        '{"limiter":{"kind":"min_size","min_size":"2"}}',
    ],
)
def test_from_json_when_it_is_no_settings_then_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Settings.from_json(text)


def test_settings_when_a_part_is_of_another_class_then_not_supported() -> None:
    part: Any = "uniform"
    with pytest.raises(NotSupportedError, match="Uniform"):
        Settings(sampler=part)
