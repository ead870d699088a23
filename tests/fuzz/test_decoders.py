"""Decoders and random input: it is refused by an error of tdserve, or accepted, and nothing else happens."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import fuzz_decoder
from tests.fuzz.decoders import Decoder, make_decoders
from tests.fuzz.inputs import Inputs

NUM_INPUTS = 400
"""For each decoder; ``python -m tests.fuzz`` takes a million."""


DECODERS = make_decoders()


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_when_its_input_is_random_then_refused_properly_or_accepted(name: str) -> None:
    decoder = DECODERS[name]
    tally = fuzz_decoder(decoder, Inputs(1), NUM_INPUTS)
    assert tally.faults == {}
    assert tally.num_accepted >= len(decoder.seeds)


def test_campaign_when_a_decoder_raises_something_else_then_it_is_a_fault_and_shows_the_input() -> None:
    def decode(content: bytes) -> object:
        return {0: 1}[len(content) % 2]

    tally = fuzz_decoder(Decoder(decode, (b"ab",)), Inputs(3), 200)
    (found,) = tally.faults.values()
    assert len(found[0]) % 2 == 1
    assert "KeyError" in found[1]
