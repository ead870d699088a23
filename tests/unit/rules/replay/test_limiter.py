from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.limiter import Limiter, LimiterCounts, MinSize, Queue, SampleToInsertRatio, choose_limiter
from tests.errors import raises


def _counts(num_rows: int, inserts: int | None = None, samples: int = 0, *, reserved: int = 0) -> LimiterCounts:
    return LimiterCounts(num_rows, num_rows if inserts is None else inserts, samples, capacity=100, reserved=reserved)


def test_can_sample_when_the_size_is_reached_then_true() -> None:
    limiter = MinSize(10)
    assert not limiter.can_sample(_counts(9, inserts=500), 1)
    assert limiter.can_sample(_counts(10), 1)
    assert limiter.can_sample(_counts(10), 256)
    limiter.check_sample(10, 1_000_000)


def test_can_insert_when_anything_then_true() -> None:
    assert MinSize(10).can_insert(_counts(100), 100)
    MinSize(10).check_insert(10, 1_000_000)


def test_why_when_a_sample_waits_for_a_size_then_names_table_size_and_need() -> None:
    text = MinSize(10).explain_sample(_counts(3, inserts=7, samples=5), "replay", 32)
    for part in ("a sample of 32 rows", "'replay'", "size 3 of 100", "inserts 7", "samples 5", "MinSize(min_size=10)"):
        assert part in text
    assert "needs a size of 10," in text


@pytest.mark.parametrize(
    ("make", "argument", "bad"),
    [
        (MinSize, "min_size", [0, -1, 1.5, True, "3"]),
        (Queue, "max_size", [0, -1, 1.5, True, "3"]),
        (lambda value: SampleToInsertRatio(1, value, 1), "min_size", [0, -1, 1.5, True, "3"]),
        (lambda value: SampleToInsertRatio(value, 1, 1), "ratio", [0, -1, float("inf"), float("nan"), "3", None]),
        (lambda value: SampleToInsertRatio(1, 1, value), "error_buffer", [0, -1, float("inf"), float("nan"), "3"]),
    ],
)
def test_limiter_when_a_value_cannot_be_then_refused(make: Any, argument: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidRequestError) as caught:
            make(value)
        assert caught.value.argument == argument


def test_ratio_when_the_buffer_is_not_given_then_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="must be given"):
        SampleToInsertRatio(1.0)


def test_ratio_when_given_as_integer_then_equal() -> None:
    assert SampleToInsertRatio(2, 3, 4) == SampleToInsertRatio(ratio=2.0, min_size=3, error_buffer=4.0)


@pytest.mark.parametrize("limiter", [MinSize(6), SampleToInsertRatio(1, 6, 10)])
def test_check_when_it_would_wait_for_ever_then_refused_with_the_reason(limiter: Limiter) -> None:
    limiter.check(6)
    with pytest.raises(InvalidRequestError, match="6 rows never fit into a capacity of 5"):
        limiter.check(5)


def test_check_when_a_queue_is_longer_than_its_table_then_refused() -> None:
    Queue(5).check(5)
    with pytest.raises(InvalidRequestError, match="6 rows do not fit into a capacity of 5"):
        Queue(6).check(5)


def _ends_somewhere(insert: int, sample: int, buffer: int) -> bool:
    """Whether single inserts and samples from the middle always end in a state that lets neither through."""
    reachable, todo = {0}, [0]
    while todo:
        at = todo.pop()
        for after in (at + insert, at - sample):
            if -buffer <= after <= buffer and after not in reachable:
                reachable.add(after)
                todo.append(after)
    left = set(reachable)
    while True:
        stuck = {at for at in left if at + insert not in left and at - sample not in left}
        if not stuck:
            return not left
        left -= stuck


@pytest.mark.parametrize(
    ("ratio", "insert", "sample"),
    [(1, 1, 1), (4, 4, 1), (3, 3, 1), (2.5, 5, 2), (0.6, 3, 5), (0.3, 3, 10), (0.1, 1, 10), (1.75, 7, 4)],
)
def test_check_when_a_buffer_lets_no_one_go_on_then_and_only_then_refused(
    ratio: float, insert: int, sample: int
) -> None:
    for buffer in range(1, 3 * max(insert, sample)):
        limiter = SampleToInsertRatio(ratio, 3, buffer / sample)
        if _ends_somewhere(insert, sample, buffer):
            with pytest.raises(InvalidRequestError, match="wait for each other for ever") as caught:
                limiter.check(100)
            assert caught.value.argument == "error_buffer"
        else:
            limiter.check(100)


@pytest.mark.parametrize("ratio", [0.1, 1 / 3, 1, 3.7, 100])
def test_check_when_the_buffer_is_as_the_reason_advises_then_accepted(ratio: float) -> None:
    SampleToInsertRatio(ratio, 3, max(1, ratio)).check(100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ratio", "min_size", "error_buffer", "write", "read"),
    [(1, 1, 1, 1, 1), (4, 10, 80, 8, 32), (0.1, 50, 3, 20, 4), (2.5, 7, 23.5, 9, 24), (1 / 3, 20, 32, 32, 53)],
)
def test_ratio_when_writers_and_samplers_push_then_stays_within_the_buffer_and_never_stops(
    seed: int, ratio: float, min_size: int, error_buffer: float, write: int, read: int
) -> None:
    limiter = SampleToInsertRatio(ratio, min_size, error_buffer)
    limiter.check(1000)
    rng = np.random.default_rng(seed)
    inserts = samples = reserved = num_both = 0
    centre = Fraction(repr(limiter.ratio)) * min_size
    for _ in range(3000):
        counts = LimiterCounts(min(inserts, 1000), inserts, samples, 1000, reserved)
        can_insert = limiter.can_insert(counts, write) and reserved < 4 * write
        can_sample = limiter.can_sample(counts, read)
        num_both += can_insert and can_sample
        # Whoever may go does so at random; a writer that reserved commits some time later.
        if can_insert and (not can_sample or rng.random() < 0.5):
            reserved += write
        elif can_sample:
            samples += read
        else:
            assert reserved, "neither may go on"
        if reserved and (rng.random() < 0.3 or not (can_insert or can_sample)):
            reserved -= write
            inserts += write
        diff = inserts * Fraction(repr(limiter.ratio)) - samples
        assert diff <= centre + Fraction(repr(limiter.error_buffer))
        assert not samples or diff >= centre - Fraction(repr(limiter.error_buffer))
    assert samples / inserts == pytest.approx(ratio, rel=0.3)
    assert num_both or 2 * error_buffer < 1.5 * (read + ratio * write)


def test_ratio_when_rows_are_reserved_then_they_count_for_writers_only() -> None:
    limiter = SampleToInsertRatio(1, 1, 5)
    assert limiter.can_insert(_counts(6, reserved=0), 0)
    assert not limiter.can_insert(_counts(6, reserved=0), 1)
    assert limiter.can_insert(_counts(3, reserved=2), 1)
    assert not limiter.can_insert(_counts(3, reserved=3), 1)
    assert limiter.can_sample(_counts(1, samples=4, reserved=50), 1)
    assert not limiter.can_sample(_counts(1, samples=5, reserved=50), 1)


def test_ratio_when_the_table_has_not_been_filled_then_inserts_pass_and_samples_wait() -> None:
    limiter = SampleToInsertRatio(1, 50, 2)
    assert limiter.can_insert(_counts(0, inserts=0), 50)
    assert limiter.can_insert(_counts(10, reserved=30), 10)
    assert not limiter.can_insert(_counts(10, reserved=50), 10)
    assert limiter.can_insert(_counts(49, inserts=49), 32)  # or nobody could go on: samples wait for it
    assert not limiter.can_insert(_counts(50, inserts=50), 3)
    assert not limiter.can_sample(_counts(49), 1)
    assert limiter.can_sample(_counts(50), 2)
    assert not limiter.can_sample(_counts(50), 3)


def test_ratio_when_rows_were_deleted_then_refilling_passes_and_samples_wait() -> None:
    limiter = SampleToInsertRatio(1, 50, 2)
    assert not limiter.can_insert(_counts(50, inserts=52), 1)
    assert limiter.can_insert(_counts(20, inserts=52), 30)
    assert not limiter.can_sample(_counts(49, inserts=52), 1)


def test_ratio_when_it_is_a_tenth_then_nothing_drifts() -> None:
    limiter = SampleToInsertRatio(0.1, 1, 1)
    inserts = 10_000_000_001
    assert limiter.can_sample(_counts(100, inserts=inserts, samples=1_000_000_000), 1)
    assert not limiter.can_sample(_counts(100, inserts=inserts - 1, samples=1_000_000_000), 1)
    assert limiter.can_insert(_counts(100, inserts=inserts + 9, samples=1_000_000_000), 1)
    assert not limiter.can_insert(_counts(100, inserts=inserts + 10, samples=1_000_000_000), 1)


@pytest.mark.parametrize("ratio", [1e-300, 1e300])
def test_ratio_when_it_is_extreme_then_still_decides(ratio: float) -> None:
    limiter = SampleToInsertRatio(ratio, 1, max(1.0, ratio))
    limiter.check(10)
    assert limiter.can_sample(_counts(1), 1)
    assert limiter.can_insert(_counts(1), 1)
    assert "SampleToInsertRatio" in limiter.explain_sample(_counts(1, samples=10**9), "replay", 10**9)


def test_check_sample_when_wider_than_the_window_then_refused_with_what_to_change() -> None:
    limiter = SampleToInsertRatio(1, 1, 16)
    limiter.check_sample(100, 32)
    with pytest.raises(InvalidRequestError, match=r"at most 32 rows at once, or make it at least 16\.5") as caught:
        limiter.check_sample(100, 33)
    assert caught.value.argument == "num_rows"


def test_check_insert_when_not_even_the_first_could_pass_then_refused_with_what_to_change() -> None:
    limiter = SampleToInsertRatio(2, 10, 50)
    limiter.check_insert(100, 50)
    with pytest.raises(InvalidRequestError, match=r"at most 50 rows through .* at least 51"):
        limiter.check_insert(100, 51)
    assert limiter.can_insert(_counts(0), 35)
    SampleToInsertRatio(2, 80, 10).check_insert(100, 80)
    assert SampleToInsertRatio(2, 80, 10).can_insert(_counts(0), 80)
    SampleToInsertRatio(2, 80, 10).check_insert(100, 85)
    assert SampleToInsertRatio(2, 80, 10).can_insert(_counts(0), 85)


def test_why_when_a_sample_waits_for_inserts_then_names_counts_ratio_and_bound() -> None:
    text = SampleToInsertRatio(2, 10, 4).explain_sample(_counts(12, samples=5), "replay", 8)
    for part in ("a sample of 8 rows", "'replay'", "size 12 of 100", "inserts 12", "samples 5", "ratio=2.0"):
        assert part in text
    assert "needs a size of 10 and inserts * ratio - samples, now 19, to be at least 16 afterwards," in text


def test_why_when_an_insert_waits_for_samples_then_names_counts_ratio_and_bound() -> None:
    text = SampleToInsertRatio(2, 10, 4).explain_insert(_counts(11, reserved=1), "replay", 2)
    for part in ("an insert of 2 rows", "'replay'", "size 11 of 100", "reserved 1", "inserts 11", "samples 0"):
        assert part in text
    assert "now 24 with what others write, to be at most 24 afterwards," in text
    assert "write fewer" not in text
    assert "write fewer" in SampleToInsertRatio(2, 10, 4).explain_insert(_counts(11), "replay", 5)


def test_explain_when_the_limiter_is_not_the_cause_then_names_the_cause() -> None:
    for limiter in (MinSize(1), SampleToInsertRatio(1, 1, 50), Queue(50)):
        assert "the sampler has too few rows" in limiter.explain_sample(_counts(9), "replay", 8)
        assert "others hold too many rows" in limiter.explain_insert(_counts(9), "replay", 8)


def test_queue_when_full_then_writers_wait_and_when_short_samplers() -> None:
    queue = Queue(10)
    assert queue.can_insert(_counts(4, reserved=3), 3)
    assert not queue.can_insert(_counts(4, reserved=3), 4)
    assert queue.can_sample(_counts(4, reserved=3), 4)
    assert not queue.can_sample(_counts(4, reserved=3), 5)
    assert "size 4 of 100" in queue.explain_sample(_counts(4), "jobs", 5)
    assert "needs a size of 5," in queue.explain_sample(_counts(4), "jobs", 5)
    assert "reserved and kept rows included, of at most 6," in queue.explain_insert(_counts(7), "jobs", 4)


def test_queue_when_a_request_exceeds_it_then_refused() -> None:
    queue = Queue(10)
    queue.check_sample(100, 10)
    queue.check_insert(100, 10)
    for check in (queue.check_sample, queue.check_insert):
        with pytest.raises(InvalidRequestError, match="11 rows never fits a queue of max_size 10"):
            check(100, 11)


def test_choose_limiter_when_both_are_given_then_they_agree() -> None:
    ratio = SampleToInsertRatio(2.0, min_size=5, error_buffer=10.0)
    assert choose_limiter(None, 5) == MinSize(5)
    assert choose_limiter(ratio, 1) is ratio
    assert choose_limiter(ratio, 5) is ratio
    for limiter in (ratio, MinSize(3), Queue(10)):
        with pytest.raises(InvalidRequestError, match=f"invalid min_size: 20, while {type(limiter).__name__}"):
            choose_limiter(limiter, 20)
    with raises(InvalidRequestError, argument="min_size"):
        choose_limiter(ratio, 0)


@pytest.mark.parametrize(
    ("limiter", "part"),
    [
        (MinSize(100), MinSize(1)),
        (SampleToInsertRatio(2.0, min_size=100, error_buffer=7.0), SampleToInsertRatio(2.0, 34, 7.0)),
        (Queue(100), Queue(34)),
    ],
)
def test_part_when_three_shards_share_a_table_then_each_has_its_part_of_the_limiter(
    limiter: Limiter, part: Limiter
) -> None:
    assert limiter.make_part(3) == part


def test_limiter_when_it_leaves_open_what_a_shard_gets_then_no_instance_is_made() -> None:
    incomplete = type("Incomplete", (MinSize,), {"make_part": Limiter.make_part})
    with pytest.raises(TypeError, match="make_part"):
        incomplete()
