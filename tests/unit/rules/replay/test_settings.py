from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.rules.replay.limiter import MinSize, Queue, SampleToInsertRatio
from tdserve.rules.replay.remover import HighestPriority, LowestPriority
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings, make_queue_settings

EVERY_PART = [
    Settings(),
    Settings(sampler=Prioritized(0.7, 0.5, 0)),
    Settings(sampler=Fifo(), limiter=Queue(5), is_queue=True),
    Settings(sampler=Lifo(), limiter=SampleToInsertRatio(2, 3, 7.5)),
    Settings(sampler=WithoutReplacement(), remover=LowestPriority()),
    Settings(sampler=LowestPriority(), remover=HighestPriority()),
    Settings(remover=Lifo()),
    Settings(sampler=WithoutReplacement(seed=7)),
    Settings(sampler=Slices(slice_len=4, end_key=("next", "done"), strict_length=False)),
    Settings(sampler=Slices(num_slices=4, trajectory_key="episode")),
    Settings(policy="policy"),
]


@pytest.mark.parametrize("given", EVERY_PART, ids=lambda settings: settings.sampler.kind)
def test_json_when_read_back_then_equal_settings_and_equal_text(given: Settings) -> None:
    assert Settings.from_json(given.to_json()) == given
    assert Settings.from_json(given.to_json()).to_json() == given.to_json()


def test_json_when_settings_are_equal_then_so_is_the_text() -> None:
    first = Settings(sampler=Prioritized(1, 0, 0), limiter=SampleToInsertRatio(1, 1, 1))
    second = Settings(sampler=Prioritized(1.0, 0.0, -0.0), limiter=SampleToInsertRatio(1.0, 1, 1.0))
    assert first == second
    assert first.to_json() == second.to_json()


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
        '{"sampler":{"kind":"best"}}',
        '{"remover":{"kind":"uniform"}}',
        '{"limiter":{"kind":"fifo"}}',
        '{"sampler":{"kind":"uniform","alpha":1}}',
        '{"limiter":{"kind":"sample_to_insert_ratio","ratio":1,"error_buffer":1,"_steps":1}}',
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
        '{"limiter":{"kind":"queue"}}',
        '{"limiter":{"kind":"sample_to_insert_ratio","error_buffer":1}}',
        '{"limiter":{"kind":"sample_to_insert_ratio","ratio":1}}',
        '{"sampler":{"kind":"prioritized","alpha":NaN}}',
        '{"sampler":{"kind":"prioritized","alpha":1e999}}',
        '{"sampler":{"kind":"prioritized","eps":1' + "0" * 400 + "}}",
        '{"sampler":{"kind":"slices"}}',
        '{"max_times_sampled":-1}',
        '{"max_times_sampled":true}',
        '{"is_queue":1}',
    ],
)
def test_from_json_when_it_is_no_settings_then_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Settings.from_json(text)


def test_settings_when_a_part_is_of_another_class_then_not_supported() -> None:
    part: Any = "uniform"
    with pytest.raises(NotSupportedError, match="Uniform"):
        Settings(sampler=part)


def test_to_json_when_numbers_have_their_default_then_they_are_left_out() -> None:
    assert "max_times_sampled" not in Settings().to_json()
    assert '"is_queue":true' in Settings(is_queue=True).to_json()
    assert '"max_times_sampled":3' in Settings(max_times_sampled=3).to_json()


@pytest.mark.parametrize(
    ("settings", "uses_priority", "counts_samples"),
    [
        (Settings(), False, False),
        (Settings(sampler=Lifo(), remover=LowestPriority()), True, False),
        (Settings(sampler=Prioritized()), True, True),
        (Settings(max_times_sampled=2), False, True),
        (Settings(sampler=WithoutReplacement(), max_times_sampled=2), False, True),
    ],
)
def test_columns_when_asked_then_what_the_parts_need(
    settings: Settings, uses_priority: bool, counts_samples: bool
) -> None:
    assert (settings.uses_priority, settings.counts_samples) == (uses_priority, counts_samples)


def test_check_when_a_part_never_fits_the_table_then_refused() -> None:
    for settings in (Settings(limiter=MinSize(6)), Settings(sampler=Slices(slice_len=6))):
        settings.check(6)
        with pytest.raises(InvalidRequestError):
            settings.check(5)


def test_settings_when_rows_go_before_the_ratio_is_reached_then_refused() -> None:
    ratio = SampleToInsertRatio(2, 1, 10)
    Settings(limiter=ratio, max_times_sampled=2)
    with pytest.raises(InvalidRequestError, match="never reached with max_times_sampled 1"):
        Settings(limiter=ratio, max_times_sampled=1)
    with pytest.raises(InvalidRequestError, match="never reached"):
        Settings(max_times_sampled=1).with_limiter(ratio)


def test_with_limiter_when_given_one_then_the_rest_stays() -> None:
    settings = Settings(sampler=Lifo(), remover=LowestPriority(), max_times_sampled=3)
    changed = settings.with_limiter(Queue(4))
    assert changed == Settings(Lifo(), LowestPriority(), Queue(4), 3)
    assert settings.limiter == MinSize(1)
    wrong: Any = Uniform()
    with pytest.raises(NotSupportedError, match="limiter"):
        settings.with_limiter(wrong)


def test_policy_when_named_then_rows_have_a_column_and_it_must_be_a_name() -> None:
    assert Settings(policy="p").list_added_columns() == ("policy_version",)
    assert (Settings().list_added_columns(), "policy" in Settings().to_json()) == ((), False)
    for policy in ("a/b", None, 3):
        with pytest.raises(InvalidRequestError):
            Settings(policy=policy)  # type: ignore[arg-type]


def test_to_json_when_a_sampler_has_no_seed_then_the_text_of_the_time_before_there_were_seeds() -> None:
    sampler = '"sampler":{"kind":"without_replacement"}'
    assert sampler in Settings(sampler=WithoutReplacement()).to_json()
    assert Settings.from_json("{" + sampler + "}") == Settings(sampler=WithoutReplacement())


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), 3])
def test_queue_when_its_sampler_has_no_order_then_refused(sampler: Any) -> None:
    with pytest.raises(InvalidRequestError, match="has no order"):
        make_queue_settings(5, sampler=sampler)


def test_queue_when_nothing_else_is_given_then_rows_leave_in_the_order_of_their_writes() -> None:
    assert make_queue_settings(5) == Settings(sampler=Fifo(), limiter=Queue(5), is_queue=True)
    assert make_queue_settings(5, sampler=Lifo(), policy="p").sampler == Lifo()


@dataclass(frozen=True)
class LaterSettings(Settings):
    """Settings with a field of a later version."""

    later: int = 3


def test_json_when_a_field_is_new_then_it_is_in_the_text_without_being_named_elsewhere() -> None:
    given = LaterSettings(later=4)
    assert LaterSettings.from_json(given.to_json()) == given
    assert LaterSettings().to_json() == Settings().to_json()
    with pytest.raises(InvalidRequestError, match="has other parts"):
        Settings.from_json(given.to_json())


@pytest.mark.parametrize(
    ("other", "may"),
    [
        (LaterSettings(sampler=Lifo(), limiter=Queue(5)), True),
        (LaterSettings(remover=Lifo()), False),
        (LaterSettings(max_times_sampled=1), False),
        (LaterSettings(later=4), False),
    ],
)
def test_settings_when_more_than_sampler_and_limiter_differ_then_a_restored_table_keeps_its_own(
    other: Settings, may: bool
) -> None:
    assert LaterSettings().may_become(other) == may
