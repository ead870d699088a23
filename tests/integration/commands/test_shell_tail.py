"""``tdserve tail``: the newest rows, and new ones as they come, in whatever order they lie."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from threading import Thread
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

import tdserve
from tdserve.cli.rows import new_rows
from tdserve.cli.rows.new_rows import NewRows
from tdserve.cli.shell.exit_codes import INTERRUPTED
from tests.integration.shell import Shell
from tests.integration.terminal import run_on_terminal
from tests.processes import REPOSITORY, wait_for
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration


@tensorclass
class Message:
    """What only this process knows."""

    text: str
    tokens: torch.Tensor


def rows(start: int, stop: int, width: int = 1) -> TensorDict:
    """Rows with their numbers."""
    number = torch.arange(start, stop)
    return TensorDict({"number": number, "wide": number[:, None].expand(-1, width).float()}, [stop - start])


def numbers_of(found: new_rows.LatestRows) -> list[int]:
    """What is in the rows that were found."""
    return [] if found.rows is None else list(found.rows["number"].tolist())


def test_tail_when_the_table_has_gone_round_then_the_newest_rows_in_order(client: tdserve.Client, shell: Shell) -> None:
    client.create_replay("table", like=rows(0, 1)[0], capacity=10).extend(rows(0, 10))
    client.replay("table").extend(rows(10, 13))
    assert shell.lines("tail", "table", "-n", "4") == [
        "row 9  number 9  wide [9]",
        "row 0  number 10  wide [10]",
        "row 1  number 11  wide [11]",
        "row 2  number 12  wide [12]",
    ]
    shown = [json.loads(line) for line in shell.lines("tail", "table", "-n", "1", "--json")]
    assert shown == [{"row": 2, "data": {"number": 12, "wide": [12.0]}}]
    assert shell.json("info", "table")["samples"] == 0


@pytest.mark.full
def test_tail_when_a_terminal_is_narrow_then_each_row_takes_one_line(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.create_replay("table", like=rows(0, 1, width=4)[0], capacity=10).extend(rows(0, 3, width=4))
    with run_on_terminal("tail", "table", "--address", server.address, columns=20) as terminal:
        assert terminal.process.wait(timeout=60) == 0
        assert terminal.read().splitlines() == [f"row {n}  number {n}  wi…" for n in range(3)]


def test_tail_when_the_store_is_a_tensordict_or_weights_then_its_last_rows_or_versions(
    client: tdserve.Client, shell: Shell
) -> None:
    client.init_remote(rows(0, 7), "plain")
    assert shell.lines("tail", "plain", "-n", "2") == ["row 5  number 5  wide [5]", "row 6  number 6  wide [6]"]
    for step in range(3):
        client.publish("policy", TensorDict({"w": torch.ones(3)}, []), metadata={"step": step, "\x1b[2J": "\x9b"})
    (line,) = shell.lines("tail", "policy", "-n", "1")
    assert line.startswith("version 3  ")
    assert line.endswith("metadata step 2, \\x1b[2J '\\x9b'")
    assert [json.loads(line)["version"] for line in shell.lines("tail", "policy", "--json")] == [2, 3]


def test_tail_when_there_is_no_order_then_one_line(client: tdserve.Client, shell: Shell) -> None:
    client.create_kv("keyed")
    client.init_remote(TensorDict({"a": torch.tensor(1)}, []), "scalar")
    assert "no order" in shell.error(1, "tail", "keyed")
    assert "no order" in shell.error(1, "tail", "scalar")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3000])
def test_new_rows_when_a_table_goes_round_then_each_once_and_in_order(client: tdserve.Client, width: int) -> None:
    """Whether it is read as a whole or in parts."""
    capacity, drawn = 2500, random.Random(width)
    table = client.create_replay("table", like=rows(0, 1, width)[0], capacity=capacity)
    is_whole = capacity * table.spec.nbytes <= new_rows.WHOLE_NBYTES
    assert is_whole == (width == 1)
    looked = NewRows(table)
    table.extend(rows(0, 100, width))
    assert numbers_of(looked.take_last(3)) == [97, 98, 99]
    at, found = 100, []
    while at < 2.5 * capacity:
        stop = at + drawn.choice([1, 7, 200, 777])
        table.extend(rows(at, stop, width))
        found.extend(numbers_of(looked.take_new()))
        at = stop
    assert found == list(range(100, at))
    assert numbers_of(looked.take_new()) == []


def test_new_rows_when_there_are_more_than_are_shown_then_the_newest_and_how_many_are_left_out(
    client: tdserve.Client,
) -> None:
    table = client.create_replay("table", like=rows(0, 1)[0], capacity=5000)
    table.extend(rows(0, 10))
    looked = NewRows(table)
    looked.take_last(1)
    table.extend(rows(10, 3010))
    found = looked.take_new()
    assert numbers_of(found) == list(range(2010, 3010))
    assert found.num_left_out == 2000


@pytest.mark.slow
def test_new_rows_when_rows_leave_in_another_order_then_each_once(client: tdserve.Client) -> None:
    queue = client.create_queue("queue", like=rows(0, 1)[0], max_size=8)
    looked = NewRows(queue)
    queue.extend(rows(0, 4))
    looked.take_last(10)
    found = []
    for number in range(4, 40):
        taken = queue.take(1, ack=False)
        queue.ack(taken)
        queue.extend(rows(number, number + 1))
        found.extend(numbers_of(looked.take_new()))
    assert found == list(range(4, 40))


@pytest.mark.slow
def test_new_rows_when_several_clients_write_then_each_once(server: tdserve.Server, client: tdserve.Client) -> None:
    table = client.create_replay("table", like=rows(0, 1)[0], capacity=1000)
    table.extend(rows(0, 1000))
    looked = NewRows(table)
    looked.take_last(1)

    def write(start: int) -> None:
        with tdserve.connect(server.address) as mine:
            for number in range(start, start + 400, 4):
                mine.replay("table").extend(rows(number, number + 4))

    threads = [Thread(target=write, args=(start,)) for start in (10_000, 20_000)]
    for thread in threads:
        thread.start()
    found: list[int] = []

    def look() -> bool:
        found.extend(numbers_of(looked.take_new()))
        return len(found) >= 800

    wait_for(look, "800 rows")
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(10_000, 10_400), *range(20_000, 20_400)]


def start_tail(*arguments: str) -> subprocess.Popen[str]:
    """A command that follows a store."""
    command = [sys.executable, "-m", "tdserve", "tail", *arguments, "--follow", "--interval", "0.05"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_lines(process: subprocess.Popen[str], num_lines: int) -> list[Any]:
    """The next lines that a command prints."""
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(num_lines)]


def end(process: subprocess.Popen[str]) -> str:
    """Ends a command as Ctrl-C does; returns what it has printed on stderr."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    return error


@pytest.mark.slow
def test_follow_when_rows_are_written_then_shown_until_it_is_interrupted(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    table = client.create_replay("table", like=rows(0, 1)[0], capacity=10)
    table.extend(rows(0, 3))
    process = start_tail("table", "-n", "2", "--address", server.address)
    assert [line.split("  ")[1] for line in read_lines(process, 2)] == ["number 1", "number 2"]
    for number in range(3, 30, 3):
        table.extend(rows(number, number + 3))
        assert [line.split("  ")[1] for line in read_lines(process, 3)] == [f"number {number + i}" for i in range(3)]
    assert end(process).strip() == ""


@pytest.mark.slow
def test_follow_when_the_server_restarts_then_goes_on() -> None:
    with make_quick_root() as root:
        first = tdserve.Server(root, port=0).start()
        address, port = first.address, int(first.address.rpartition(":")[2])
        with tdserve.connect(address) as client:
            client.publish("policy", TensorDict({"w": torch.ones(3)}, []))
            process = start_tail("policy", "--json", "--address", address)
            assert json.loads(read_lines(process, 1)[0])["version"] == 1
            first.shutdown()
            assert process.stderr is not None
            assert process.stderr.readline().startswith("tdserve: waits for the server: ")
            with tdserve.Server(root, port=port):
                client.publish("policy", TensorDict({"w": torch.ones(3)}, []))
                assert json.loads(read_lines(process, 1)[0])["version"] == 2
                end(process)


@pytest.mark.parametrize("command", ["head", "tail"])
@pytest.mark.full
def test_rows_when_their_class_is_defined_elsewhere_then_shown_as_tensordicts(
    server: tdserve.Server, client: tdserve.Client, command: str
) -> None:
    row = TensorDict({"message": Message(text="hello", tokens=torch.arange(2), batch_size=[])}, [])  # type: ignore[call-arg]
    client.create_replay("messages", row, 4).extend(torch.stack([row, row.clone()]))
    client.init_remote(torch.stack([row, row.clone()]), "plain")
    for name in ("messages", "plain"):
        arguments = [sys.executable, "-m", "tdserve", command, name, "--address", server.address]
        shown = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.count("hello") == 2
