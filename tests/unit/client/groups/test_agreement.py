from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CapacityError, InvalidRequestError, RemoteProtocolError, SpecMismatchError, TDServeError
from tdserve.client.groups.agreement import (
    Agreed,
    Known,
    agree,
    agree_pair,
    describe_structure,
    find_failure,
    judge_calls,
)
from tdserve.client.groups.member_parts import compute_fingerprint
from tdserve.control.status import decode_failure, encode_failure
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec, check_matches
from tdserve.transport.group_content import CallChannel
from tdserve.v1 import group_pb2
from tests.unit.transport.group_channels import open_channels

SPEC = capture(TensorDict({"x": torch.zeros(3)})).spec
OTHER = capture(TensorDict({"x": torch.zeros(4)})).spec


def call_of(spec: Spec | None = None, kind: str = "broadcast", **fields: object) -> group_pb2.GroupCall:
    """A member's call, with a structure that no other member knows."""
    call = group_pb2.GroupCall(kind=kind, number=1, **fields)  # type: ignore[arg-type]
    if spec is not None:
        describe_structure(call, spec, compute_fingerprint(spec), Known({}))
    return call


def test_judge_calls_when_all_fit_then_the_structure_of_the_root_and_everybodys_sizes() -> None:
    calls = [call_of(root=1), call_of(SPEC, root=1, values_nbytes=[7]), call_of(root=1)]
    verdict = judge_calls(calls)
    assert verdict.fingerprint == compute_fingerprint(SPEC)
    assert verdict.HasField("spec")
    assert list(verdict.values_nbytes) == [0, 7, 0]
    assert not verdict.examines
    assert not verdict.HasField("failure")


def test_judge_calls_when_of_a_scatter_then_the_sizes_are_the_roots() -> None:
    calls = [call_of(kind="scatter"), call_of(kind="scatter")]
    calls[0].values_nbytes.extend([5, 6])
    assert list(judge_calls(calls).values_nbytes) == [5, 6]


def test_judge_calls_when_a_fingerprint_differs_then_all_examine() -> None:
    assert judge_calls([call_of(SPEC), call_of(OTHER)]).examines
    assert not judge_calls([call_of(SPEC), call_of(SPEC)]).examines


@pytest.mark.parametrize("fields", [{"kind": "scatter"}, {"root": 1}, {"op": "max"}])
def test_judge_calls_when_calls_differ_then_the_verdict_names_the_rank(fields: dict[str, object]) -> None:
    calls = [call_of(), call_of(), call_of(**fields)]  # type: ignore[arg-type]
    verdict = judge_calls(calls)
    error = decode_failure(verdict.failure)
    assert isinstance(error, InvalidRequestError)
    assert verdict.rank == 2
    assert "rank 2 calls" in str(error)


def test_first_failure_when_several_fail_then_the_lowest_ranks() -> None:
    calls = [call_of(), call_of(), call_of()]
    assert find_failure(calls) is None
    for rank in (2, 1):
        calls[rank].failure.CopyFrom(encode_failure(CapacityError(what=str(rank))))
    verdict = find_failure(calls)
    assert verdict is not None
    assert verdict.rank == 1
    assert judge_calls(calls) == verdict


def test_known_when_a_structure_was_sent_then_it_is_not_sent_again_and_an_unsent_one_is_an_error() -> None:
    known = Known({})
    call = call_of()
    describe_structure(call, SPEC, b"f", known)
    assert call.HasField("spec")
    known.learn(b"f", call)
    assert known.get(b"f") == SPEC
    again = call_of()
    describe_structure(again, SPEC, b"f", known)
    assert not again.HasField("spec")
    assert again.fingerprint == b"f"
    with pytest.raises(RemoteProtocolError):
        known.get(b"another")


def test_known_when_keys_come_in_another_order_then_the_structure_is_sent_again() -> None:
    up, down = (capture(TensorDict({key: torch.zeros(3) for key in order})).spec for order in ("xy", "yx"))
    known, sent = Known({}), []
    for spec in (up, up, down, down, up):
        call = call_of()
        describe_structure(call, spec, compute_fingerprint(spec), known)
        known.learn(call.fingerprint, call)
        assert known.get(call.fingerprint) == spec
        sent.append(call.HasField("spec"))
    assert sent == [True, False, True, False, True]


def play(specs: list[Spec], own: dict[int, TDServeError]) -> list[Agreed]:
    """What members agree on that hold these structures; the call is a gather."""

    def agree_here(channel: CallChannel) -> Agreed:
        rank = channel.rank
        known = Known({})
        call = group_pb2.GroupCall(kind="gather", fingerprint=compute_fingerprint(specs[rank]), values_nbytes=[rank])
        if rank == 0:
            describe_structure(call, specs[0], compute_fingerprint(specs[0]), known)
        check = None if rank == 0 else lambda spec: check_matches(spec, specs[rank], store="g")
        return agree(channel, call, known=known, check=check, own=own.get(rank))

    with open_channels(len(specs)) as channels:
        return channels.each(agree_here)


def test_agree_when_all_hold_the_same_then_all_get_it() -> None:
    for agreed in play([SPEC, SPEC, SPEC], {}):
        assert agreed == Agreed(SPEC, [0, 1, 2])


def test_agree_when_only_what_does_not_count_differs_then_agreed() -> None:
    named = capture(TensorDict({"x": torch.zeros(3)}, [3], names=["row"])).spec
    plain = capture(TensorDict({"x": torch.zeros(3)}, [3])).spec
    assert [agreed.spec for agreed in play([plain, named], {})] == [plain, plain]


def test_agree_when_one_has_another_structure_then_each_error_names_key_and_rank() -> None:
    found = [agreed.failure for agreed in play([SPEC, SPEC, OTHER], {})]
    assert all(isinstance(error, SpecMismatchError) and error.key == "x" for error in found)
    assert [error.actual for error in found if error] == ["float32[4] at rank 2"] * 2 + ["float32[4]"]


def test_agree_when_the_first_cannot_take_part_then_it_raises_its_own() -> None:
    found = [agreed.failure for agreed in play([SPEC, SPEC], {0: CapacityError(what="it")})]
    assert [type(error).__name__ for error in found] == ["CapacityError", "TransferAbortedError"]


@pytest.mark.parametrize(("taken", "names"), [(SPEC, [None, None]), (OTHER, ["SpecMismatchError"] * 2)])
def test_agree_pair_when_structures_are_compared_then_both_come_to_the_same(
    taken: Spec, names: list[str | None]
) -> None:
    sent_specs, received_specs = Known({}), Known({})

    def agree_here(channel: CallChannel) -> Agreed:
        if channel.rank == 0:
            call = group_pb2.GroupCall(kind="send", values_nbytes=[9])
            describe_structure(call, SPEC, compute_fingerprint(SPEC), sent_specs)
            return agree_pair(channel, 1, call, sent_specs=sent_specs, received_specs=Known({}), check=None, own=None)
        call = group_pb2.GroupCall(kind="recv", fingerprint=compute_fingerprint(taken))
        return agree_pair(
            channel,
            0,
            call,
            sent_specs=Known({}),
            received_specs=received_specs,
            check=lambda spec: check_matches(spec, taken, store="g"),
            own=None,
        )

    with open_channels(2) as channels:
        for _ in range(2):  # the second time, the structure is known
            found = channels.each(agree_here)
            assert [None if each.failure is None else type(each.failure).__name__ for each in found] == names
            if names[0] is None:
                assert found == [Agreed(SPEC, [9])] * 2
