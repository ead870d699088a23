from __future__ import annotations

from pathlib import Path

import pytest

from tests.fanout_simulation import MIB, Network, format_table, simulate

README = Path(__file__).parents[3] / "tdserve/bench/README.md"
IDEAL = Network(latency_s=0.0, pair_s=0.0, direct_s=0.0, relayed_s=0.0, verified_bytes_per_s=1e15)


def test_simulate_when_there_is_no_tree_then_the_server_sends_everything_at_the_rate_of_its_link() -> None:
    found = simulate(10, 64 * MIB, 0, IDEAL)
    assert found.server_bytes == 640 * MIB
    assert found.last_s == pytest.approx(640 * MIB / IDEAL.nic_bytes_per_s)
    assert found.depth == 1


def test_simulate_when_it_is_one_chain_then_all_have_it_a_chunk_per_end_later() -> None:
    found = simulate(5, 64 * MIB, 1, IDEAL)
    chunk_s = IDEAL.chunk_bytes / IDEAL.nic_bytes_per_s
    assert found.server_bytes == 64 * MIB
    assert found.last_s == pytest.approx(16 * chunk_s + 4 * chunk_s, rel=1e-4)
    assert found.depth == 5


@pytest.mark.slow
@pytest.mark.parametrize("fanout", [2, 4, 8])
def test_simulate_when_it_is_a_tree_then_the_server_sends_no_more_however_many_pull(fanout: int) -> None:
    few, many = simulate(50, 64 * MIB, fanout), simulate(400, 64 * MIB, fanout)
    assert few.server_bytes == many.server_bytes == fanout * 64 * MIB
    assert many.last_s < simulate(400, 64 * MIB, 0).last_s / 10
    assert few.first_s <= few.median_s <= few.last_s


def test_simulate_when_the_control_process_is_slow_then_that_is_what_the_last_waits_for() -> None:
    assert simulate(100, 4 * MIB, 4, Network(relayed_s=0.1)).last_s > 9.0


def test_table_when_made_then_a_line_for_each_fanout() -> None:
    lines = format_table(num_pullers=20, nbytes=8 * MIB, fanouts=(0, 2))
    assert len(lines) == 4
    assert lines[2].startswith("| none | ")
    assert lines[3].startswith("| 2 | ")


@pytest.mark.slow
@pytest.mark.parametrize("fanout", [0, 1, 2, 4, 8])
def test_table_when_made_for_a_thousand_pullers_then_stands_in_the_readme(fanout: int) -> None:
    assert "\n".join(format_table(fanouts=[fanout])[2:]) in README.read_text()
