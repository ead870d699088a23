from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import tdserve
from tdserve.base.errors import InvalidRequestError
from tdserve.base.torchrun_rank import TorchrunRank
from tdserve.examples.collectors import __main__ as under_test
from tdserve.examples.collectors.__main__ import KEY, end_on_signals, parse, provide_server, run_rank


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def rank_of(rank: int, *, world_size: int = 3, local_world_size: int = 3, port: int = 1) -> TorchrunRank:
    return TorchrunRank(rank, world_size, rank, local_world_size, "127.0.0.1", port)


def test_parse_when_nothing_is_said_then_leaves_server_and_number_open() -> None:
    options = parse([])
    assert (options.collectors, options.address) == (None, None)


@pytest.mark.parametrize("arguments", [["--collectors=0"], ["--versions=0"]])
def test_parse_when_a_number_cannot_be_then_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [
        (["--collectors=2"], rank_of(0)),
        ([], rank_of(0, world_size=1, local_world_size=1)),
        ([], rank_of(0, world_size=4, local_world_size=2)),
    ],
)
def test_rank_when_the_job_cannot_be_then_is_refused_before_anything_starts(
    arguments: list[str], rank: TorchrunRank
) -> None:
    with pytest.raises(InvalidRequestError):
        run_rank(parse(arguments), rank)


def test_rank_when_not_the_first_then_collects_on_the_server_that_the_first_has_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(under_test, "collect_all", lambda *args, **named: seen.append((args, named)))
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.PrefixStore(f"{KEY}/0", job).set(KEY, "10.0.0.1:7 run")  # type: ignore[attr-defined]
    run_rank(parse([]), rank_of(2, port=job.port))
    assert seen == [(("10.0.0.1:7", "run"), {"index": 1, "local_index": 2})]


def test_server_when_one_is_given_then_starts_none() -> None:
    with provide_server("10.0.0.1:7") as address:
        assert address == "10.0.0.1:7"


def test_server_when_none_is_given_then_it_lives_as_long_as_the_block() -> None:
    with provide_server(None) as address, tdserve.connect(address) as client:
        assert client.stores() == []
    with pytest.raises(tdserve.ConnectError):
        tdserve.connect(address, timeout_s=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("_signals")
def test_signals_when_one_comes_then_the_stack_unwinds_once(number: signal.Signals) -> None:
    end_on_signals()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
