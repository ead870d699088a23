"""Roles of children of ``ForkedClients``. Each has its own client on the server's machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import check_transport
from tdserve.messages.layout import LARGE_LEAF_BYTES
from tdserve.store.rows.claim_file import FOLDER, ClaimFile
from tests.integration.self_signals import strike_in_copy, strike_in_opening, strike_in_place

Say = Callable[..., None]

TIMEOUT_S = 60.0
"""Timeout of every call."""

NUM_ROWS = 8
NUM_FLOATS = 500
_CLONE_NEWNS = 0x00020000
_CLONE_NEWPID = 0x20000000


def row(text: str = "") -> TensorDict:
    """Returns the structure of one row."""
    td: TensorDict = rows(0, 1, text=text)[0]
    return td


def rows(number: int, num_rows: int = NUM_ROWS, *, text: str = "") -> TensorDict:
    """Returns rows that hold ``number`` everywhere, so that a torn row shows. With ``text`` they also have a non-tensor
    value."""
    body = torch.full((num_rows, NUM_FLOATS), float(number), dtype=torch.float64)
    numbers = torch.full((num_rows,), number)
    td = TensorDict({"first": numbers, "body": body, "last": numbers.clone()}, [num_rows])
    if text:
        td["text"] = [f"{text}:{number}"] * num_rows
    return td


def numbers_in(td: Any) -> list[int]:
    """Returns the number of each row; fails if a row is torn."""
    first = td["first"]
    assert torch.equal(td["last"], first), "a row is torn"
    assert bool((td["body"] == first[..., None].double()).all()), "a row is torn"
    found: list[int] = first.reshape(-1).tolist()
    if "text" in td.keys():  # noqa: SIM118 (iterating a tensordict yields rows)
        texts = td["text"]
        numbers = [int(text.partition(":")[2]) for text in ([texts] if isinstance(texts, str) else texts)]
        assert numbers == found, "a row's value is another row's"
    return found


def put(client: tdserve.Client, kind: str, name: str, content: TensorDict) -> object:
    """Makes one write."""
    if kind == "extend":
        return client.replay(name).extend(content).tolist()
    if kind == "overwrite":
        handle = client[name]
        if isinstance(handle, tdserve.StoreHandle):
            handle[: len(content)] = content
        else:
            assert isinstance(handle, tdserve.ReplayHandle)
            handle.set_at_("content", content["content"], torch.arange(len(content)))
        return "stored"
    if kind == "overwrite_key":
        handle = client[name]
        index = slice(0, len(content)) if isinstance(handle, tdserve.StoreHandle) else torch.arange(len(content))
        handle.set_at_("first", content["first"], index)
        return "stored"
    if kind == "add_key":
        client[name]["added"] = content["body"]
        return "stored"
    return getattr(client, kind)(*((name, content) if kind == "publish" else (content, name)))


def write(
    say: Say,
    address: str,
    kind: str,
    name: str,
    number: int,
    *,
    at: int = -1,
    signal_number: int = signal.SIGKILL,
    opening: bool = False,
    transport: str = "shm",
    num_rows: int = NUM_ROWS,
    text: str = "",
    nested: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Makes one write, interrupted by a signal if asked."""
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=timeout_s) as client:
        say("connected", client.stats()["transport"])
        content = rows(number, num_rows, text=text)
        if nested:
            content = TensorDict({"content": content}, [num_rows])
        if at >= 0:
            strike_in_place(at, signal_number)
        if opening:
            strike_in_opening(signal_number)
        try:
            say("done", put(client, kind, name, content))
        except tdserve.TDServeError as error:
            say("error", type(error).__name__, error.retryable, error)


def claim(
    say: Say, address: str, name: str, num_extends: int, *, at: int = -1, signal_number: int = signal.SIGKILL
) -> None:
    """Extends by the numbers from 1 on. The first few extends are requested, the others claimed; the last one may be
    interrupted by a signal."""
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        replay = client.replay(name)
        for number in range(1, num_extends):
            say("wrote", number, *replay.extend(rows(number)).tolist())
        say("claims", is_claiming(client, name))
        if at >= 0:
            strike_in_place(at, signal_number)
        say("wrote", num_extends, *replay.extend(rows(num_extends)).tolist())
        signal.pause()


def is_claiming(client: tdserve.Client, name: str) -> bool:
    """Returns whether a writer of a table takes rows by itself."""
    return find_num_claimed(client, name) is not None


def find_num_claimed(client: tdserve.Client, name: str) -> int | None:
    """Returns how many extends a writer of a table has claimed rows for; None if none may."""
    folder = Path(client.stats()["root"]) / client.describe(name).path / FOLDER
    for path in folder.glob("*"):
        try:
            file = ClaimFile.open(path)
        except tdserve.CorruptDataError:  # it is over, and removed meanwhile
            continue
        if not file.is_over:
            return file.num_written
    return None


def leave_root(say: Say, address: str, root: str) -> None:
    """Prints how the client is connected in a mount namespace that hides the server's files or shows others in their
    place."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or subprocess.run(["mount", "--make-rprivate", "/"], check=False).returncode:
        say("not allowed")
        return
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    with tdserve.connect(address) as client:
        say("auto", client.stats()["transport"])
        client.replay("r").extend(rows(2))
        say("sampled", *sorted(set(numbers_in(client.replay("r").sample(50)))))
    began = time.monotonic()
    try:
        tdserve.connect(address, transport="shm", root=root, timeout_s=TIMEOUT_S)
    except tdserve.TDServeError as error:
        say("error", type(error).__name__, isinstance(error, tdserve.ConnectError), error)
    say("at once", time.monotonic() - began < TIMEOUT_S / 4)


def leave_pids(say: Say, address: str, name: str) -> None:
    """Uses rows with non-tensor values in another pid namespace, where the server cannot count their readers."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID):
        say("not allowed")
        return
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
            say("pid", os.getpid(), client.stats()["transport"])
            replay, store = client.replay(f"{name}-r"), client[f"{name}-td"]
            assert isinstance(store, tdserve.StoreHandle)
            say("sampled", *sorted(set(numbers_in(replay.sample(20)))))
            say("read", *sorted(set(numbers_in(store[:]) + numbers_in(store[2:4]))))
            replay.extend(rows(5, text="text"))
            store[1:3] = rows(5, 2, text="text")
            say("sampled", *sorted(set(numbers_in(replay.sample(50)))))
            say("read", *sorted(set(numbers_in(store[:]) + numbers_in(store[2:4]))))
    finally:
        os._exit(0)


def use_read_only(say: Say, address: str, uid: int) -> None:
    """Tries everything that a client without write access to the files can do by itself, and all kinds of writes."""
    # First, while it still has access: modules that are imported later may lie where the other user may not go.
    with tdserve.connect(address, transport="shm") as client:
        client.replay("r").sample(1)
        client.latest("w")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        say("connected", client.stats()["transport"])
        replay = client.replay("r")
        say("sampled", *sorted(set(numbers_in(replay.sample(50)))))
        say("read", *sorted(set(numbers_in(replay[:]))))
        store = client["td"]
        assert isinstance(store, tdserve.StoreHandle)
        say("store", *numbers_in(store[:]), *numbers_in(store[1]))
        for copy in (True, False):
            weights = client.latest("w", copy=copy)
            assert weights is not None
            say("latest", *numbers_in(weights.data))
            weights.data["first"] += 1  # its own
        prioritized = client.replay("p")
        prioritized.update_priority(torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), 0.0))
        prioritized.update_priority(torch.tensor([3]), torch.tensor([1.0]))
        say("updated", *sorted(set(prioritized.sample(50)["index"].tolist())))
        large = TensorDict({"x": torch.zeros(1 << 16)}, [])  # the catalog keeps smaller ones
        writes: list[Callable[[], object]] = [
            lambda: replay.extend(rows(9)),
            lambda: replay.extend(rows(9), return_early=True).result(TIMEOUT_S),
            lambda: replay.set_at_("body", torch.zeros(1).double(), torch.tensor([0])),
            lambda: store.set_at_("body", torch.zeros(1).double(), 0),
            lambda: client.send(rows(9), "td"),
            lambda: client.init_remote(large, "new"),
            lambda: client.memmap(large, "copied"),
            lambda: client.publish("w", rows(9)),
            lambda: client.publish("new-w", rows(9)),
        ]
        for write_it in writes:
            write_it()
        say("written", *numbers_in(replay[-1:]), *numbers_in(store[1]), client.versions("w")[-1].version)


def fork_with(say: Say, address: str) -> None:
    """Forks in the middle of its work. The child prints what it cannot do, and lives on."""
    client = tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S)
    replay = client.replay("r")
    mapped = client.latest("w", copy=False)
    pid = os.fork()
    if not pid:
        calls: list[Callable[[], object]] = [
            lambda: client.replay("r").sample(2),
            lambda: client.from_remote_init("r"),
            lambda: client.publish("w", rows(9)),
        ]
        for call in calls:
            try:
                call()
            except tdserve.TDServeError as error:
                say("child", type(error).__name__)
        assert mapped is not None
        say("child", "sees", *numbers_in(mapped.data))
        with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as own:
            say("child", "samples", *sorted(set(numbers_in(own.replay("r").sample(2)))))
        say("child", "inherited", *sorted(set(numbers_in(replay.sample(2)))))
        client.close()
        signal.pause()
    say("forked", pid)
    say("parent", *sorted(set(numbers_in(replay.sample(2)))))
    strike_in_place(1, signal.SIGKILL)
    replay.extend(rows(7))


def copy_slowly(say: Say, address: str, name: str, is_sample: bool) -> None:
    """Reads and stops after the first leaf was copied; continues later."""
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        handle: Any = client[name]
        say("before", *sorted(set(numbers_in(handle[:]))))
        strike_in_copy(signal.SIGSTOP)
        try:
            found = handle.sample(4 * NUM_ROWS) if is_sample else handle[:]
        except tdserve.TDServeError as error:
            say("error", type(error).__name__, error)
        else:
            say("found", *sorted(set(numbers_in(found))))


def exchange(say: Say, address: str, *, writer: int, num_writes: int) -> None:
    """Overwrites the same rows of a store and of a replay table again and again, as other processes do."""
    rng = random.Random(writer)
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        store, replay = client["td"], client.replay("r")
        assert isinstance(store, tdserve.StoreHandle)
        num_rows = store.batch_size[0]
        for number in range(writer * 100_000, writer * 100_000 + num_writes):
            first = rng.randrange(num_rows)
            last = rng.randrange(first, num_rows) + 1
            store[first:last] = rows(number, last - first)
            index = replay.extend(TensorDict({"content": rows(number, last - first)}, [last - first]))
            with contextlib.suppress(tdserve.SelectionError):  # others have them by now
                replay.set_at_("content", rows(-number, last - first), index)
        say("wrote", num_writes)


def watch(say: Say, address: str, *, reader: int, until: int, transport: str) -> None:
    """Reads rows in every way until so many writes were done; every row must be whole. Prints a line when it begins."""
    rng = random.Random(reader)
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        store, replay = client["td"], client.replay("r")
        assert isinstance(store, tdserve.StoreHandle)
        num_rows, num_reads = store.batch_size[0], 0
        reads: list[Callable[[], Any]] = [
            lambda: store[rng.randrange(num_rows)],
            lambda: store[: rng.randrange(num_rows) + 1],
            lambda: store[torch.tensor([rng.randrange(num_rows) for _ in range(5)])],
            store.to_tensordict,
            lambda: replay.sample(8)["content"],
        ]
        while client.describe("td").version < until:
            for read in reads:
                numbers_in(read())
                num_reads += 1
            if num_reads == len(reads):
                say("begins")
        say("read", num_reads)


def map_version(say: Say, address: str, name: str) -> None:
    """Maps the newest version and reads every byte of it. When asked, prints how much of the mapping is private."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        weights = client.latest(name, copy=False)
        assert weights is not None
        data: Any = weights.data
        say("sum", *(int(tensor.sum()) for tensor in data.values(True, True)))
        signal.sigwait({signal.SIGUSR1})
        say("pss", pss_of("/versions/"))
        signal.sigwait({signal.SIGUSR1})


def pss_of(part: str) -> int:
    """Returns this process's share, in bytes, of the mapped files whose path contains a part."""
    total, is_meant = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            is_meant = part in line
        elif fields[0] == "Pss:" and is_meant:
            total += int(fields[1]) * 1024
    return total


def use_slowly(say: Say, address: str, kind: str, name: str) -> None:
    """Uses a store for the first time and stops in the middle of mapping it."""
    with tdserve.connect(address, transport="shm", timeout_s=TIMEOUT_S) as client:
        handle: Any = client[name]
        strike_in_opening(signal.SIGSTOP)
        try:
            if kind == "read":
                say("found", *numbers_in(handle[:]))
            else:
                say("done", put(client, kind, name, rows(9)))
        except tdserve.TDServeError as error:
            say("error", type(error).__name__, error)


def follow(say: Say, address: str, name: str, last: int, *, transport: str, copy: bool = True) -> None:
    """Pulls every version that it can, up to a given one. Each must be whole and newer than the one before. Prints the
    first one, and at the end all of them."""
    with tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S) as client:
        say("connected", client.stats()["transport"])
        seen: list[int] = [0]
        for weights in client.subscribe(name, copy=copy):
            numbers = set(numbers_in(weights.data))
            assert numbers == {weights.version}, f"version {weights.version} holds {numbers}"
            assert weights.version > seen[-1], f"version {weights.version} after {seen}"
            seen.append(weights.version)
            if len(seen) == 2:
                say("begins with", weights.version)
            if weights.version == last:
                break
        say("seen", *seen[1:])


def pull(say: Say, address: str, name: str, *, num_posted: int) -> None:
    """Pulls one version over gloo. It stops in the middle, before a given number of messages, until it is woken up."""
    from tdserve.transport.gloo import GlooChannel

    channel: Any = GlooChannel
    count = iter(range(1_000_000))
    recv = channel.recv

    def receiving(self: Any, buffer: torch.Tensor, tag: int) -> Any:
        work = recv(self, buffer, tag)
        if buffer.nbytes >= LARGE_LEAF_BYTES and next(count) == num_posted - 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return work

    channel.recv = receiving
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        found = client.latest(name)
        assert found is not None
        say("version", found.version, *sorted(set(numbers_in(found.data))))


def publish_partly(say: Say, address: str, name: str, number: int, num_rows: int) -> None:
    """Publishes a version over gloo and is killed in the middle of sending it."""
    from tdserve.client.transfers import upload as _outgoing

    outgoing: Any = _outgoing
    send_messages = outgoing.send_messages

    def sending(channel: Any, tag: int, messages: Any, source: Any, **named: Any) -> None:
        send_messages(channel, tag, messages[: len(messages) // 2], source, **named)
        say("half")
        os.kill(os.getpid(), signal.SIGKILL)

    outgoing.send_messages = sending
    with tdserve.connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        client.publish(name, rows(number, num_rows))
