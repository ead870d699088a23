from __future__ import annotations

import pytest

from tdserve.transport.gloo_reasons import get_reason

PLACE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
ADVICE = " This is typically caused by a remote worker crashing. Check the logs of the remote worker."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"{PLACE}Connection closed by peer [127.0.0.1]:24471.{ADVICE}", "Connection closed by peer [127.0.0.1]:24471"),
        (f"Gloo connectFullMesh failed with {PLACE}timed out connecting: refused$0", "timed out connecting: refused$0"),
        (f"{PLACE}Timed out waiting 863ms for recv operation\nmore", "Timed out waiting 863ms for recv operation"),
        ("Cannot resolve 192.0.2.1 to a (local) address", "Cannot resolve 192.0.2.1 to a (local) address"),
        ("", ""),
        ("x" * 1000, "x" * 300),
    ],
    ids=["closed", "refused", "timeout", "address", "nothing", "long"],
)
def test_reason_when_gloo_names_places_in_its_sources_then_only_what_happened(given: str, expected: str) -> None:
    assert get_reason(RuntimeError(given)) == expected
