from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import NcclUnavailableError, NotSupportedError, TDServeError
from tdserve.rules import channel_transports
from tdserve.rules.channel_transports import (
    CHANNEL_TRANSPORTS,
    ChannelChoice,
    ChannelTransport,
    SessionEnds,
    check_available,
    check_granted,
    choose_channel,
)


@pytest.mark.parametrize(
    ("asked", "ends", "reason"),
    [
        ("auto", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, ""),
        ("auto", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, "one machine"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "a"}, "both ends use one GPU, a"),
        ("auto", {"client_gpu": "a", "worker_gpu": "a", "is_one_machine": True}, "both ends use one GPU, a"),
        ("nccl", {"client_gpu": "", "worker_gpu": "b"}, "the client has no GPU"),
        ("nccl", {"client_gpu": "a", "worker_gpu": ""}, "--device"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "", "why_no_gpu": "there is no cuda:3"}, "there is no cuda:3"),
        ("gloo", {"client_gpu": "a", "worker_gpu": "b"}, "'gloo' was asked for"),
        ("shm", {"client_gpu": "a", "worker_gpu": "b"}, "'shm' was asked for"),
    ],
)
def test_nccl_when_the_ends_are_compared_then_used_or_the_reason_is_given(
    asked: str, ends: dict[str, Any], reason: str
) -> None:
    choice = choose_channel(asked, SessionEnds(**ends))
    assert choice.transport == ("gloo" if reason else "nccl")
    assert bool(choice.why_not) == bool(reason)
    assert reason in choice.why_not


@pytest.mark.parametrize("asked", ["auto", "gloo", "shm"])
def test_choice_when_no_gpu_is_named_then_gloo_and_no_word_of_nccl(asked: str) -> None:
    assert choose_channel(asked, SessionEnds(worker_gpu="b")) == ChannelChoice("gloo")


def test_choice_when_a_better_transport_is_registered_then_auto_takes_it_where_it_suits_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why_not(ends: SessionEnds, is_asked_for: bool) -> str:
        return "" if ends.is_one_machine or is_asked_for else "too far"

    pigeon = ChannelTransport(num_descriptors=1, is_reopened=True, needs_device=False, why_not=why_not)
    monkeypatch.setattr(channel_transports, "CHANNEL_TRANSPORTS", {"pigeon": pigeon, **CHANNEL_TRANSPORTS})
    assert choose_channel("auto", SessionEnds(is_one_machine=True)) == ChannelChoice("pigeon")
    assert choose_channel("auto", SessionEnds()) == ChannelChoice("gloo")
    assert choose_channel("pigeon", SessionEnds()) == ChannelChoice("pigeon")
    assert choose_channel("gloo", SessionEnds(is_one_machine=True)) == ChannelChoice("gloo")


@pytest.mark.parametrize(
    ("asked", "granted", "error", "reason"),
    [
        ("nccl", ChannelChoice("gloo", "told"), NcclUnavailableError, "no NCCL with the server at a:1: told"),
        ("nccl", ChannelChoice("gloo"), NcclUnavailableError, "the server gives no reason"),
        ("nccl", ChannelChoice("nccl"), NcclUnavailableError, "the client has no GPU"),
        ("gloo", ChannelChoice("nccl"), NotSupportedError, "transport 'gloo'.*the client has no GPU"),
        ("gloo", ChannelChoice("pigeon"), NotSupportedError, "transport 'gloo'.*a:1.*chose 'pigeon'"),
    ],
)
def test_granted_when_it_is_not_what_was_asked_for_by_name_then_refused_by_name(
    asked: str, granted: ChannelChoice, error: type[TDServeError], reason: str
) -> None:
    with pytest.raises(error, match=reason) as caught:
        check_granted(asked, granted, SessionEnds(), address="a:1")
    assert not caught.value.retryable


@pytest.mark.parametrize("asked", ["auto", "shm"])
def test_granted_when_nothing_was_asked_for_by_name_then_taken_or_gloo(asked: str) -> None:
    told = ChannelChoice("gloo", "told")
    assert check_granted(asked, told, SessionEnds(), address="a:1") == told
    choice = check_granted(asked, ChannelChoice("nccl"), SessionEnds("a", "a"), address="a:1")
    assert choice.transport == "gloo"
    assert "both ends use one GPU" in choice.why_not


def test_check_available_when_this_end_lacks_a_transport_then_refused_with_those_it_has() -> None:
    for transport in ("auto", "shm", "nccl", "gloo", "grpc"):
        check_available(transport)
    with pytest.raises(NotSupportedError, match=r"transport 'pigeon'.*auto, shm, nccl, gloo, grpc"):
        check_available("pigeon")
