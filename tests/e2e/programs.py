"""Programs that the tests run in containers: each connects as a command does, by the variables of its environment."""

from __future__ import annotations

_CONNECT = """
import itertools, torch, tdserve
from tensordict import TensorDict
from tdserve.cli.shell.options import make_endpoint
client = make_endpoint(None, None).connect(timeout_s=60.0)
"""

CHECKSUM = f"""{_CONNECT}
from tdserve.examples.demo.demo_stores import compute_checksum
print("data checksum:", compute_checksum(client.replay("transitions")))
"""

WRITE_NUMBERS = f"""{_CONNECT}
row = TensorDict({{"n": torch.tensor(0)}}, [])
table = client.create_replay("numbers", like=row, capacity=4_000_000, exists_ok=True)
for end in itertools.count(8, 8):
    table.extend(TensorDict({{"n": torch.arange(end - 8, end)}}, [8]))
    print("acknowledged", end, flush=True)
"""

READ_NUMBERS = f"""{_CONNECT}
found = client.replay("numbers")[:]["n"]
print(len(found), bool((found.sort().values == torch.arange(len(found))).all()))
"""

TAKE_AND_EAT = f"""{_CONNECT}
row = TensorDict({{"n": torch.tensor(0)}}, [])
queue = client.create_queue("todo", like=row, max_size=8, exists_ok=True)
queue.extend(row.expand(8).clone())
with queue.take(8):
    print("has them", flush=True)
    eaten = [b"x" * (1 << 24) for _ in itertools.count()]
"""

TAKE = f"""{_CONNECT}
with client.queue("todo").take(8) as rows:
    print(len(rows))
"""

_WAIT = """
import sys, time
def wait_for(look, what):
    end = time.monotonic() + 60.0
    while not look():
        time.sleep(0.1)
        if time.monotonic() > end:
            sys.exit(what + " did not happen")
"""

FILL = f"""{_CONNECT}{_WAIT}
made, block = 0, TensorDict({{"a": torch.ones(1 << 18)}}, [])
try:
    while True:
        client.init_remote(block, f"block-{{made}}")
        made += 1
except tdserve.CapacityError as error:
    print(error)
print(made > 0, sorted(client.stores()) == sorted(f"block-{{n}}" for n in range(made)))
print(bool((client.from_remote_init(f"block-{{made - 1}}")["a"] == 1).all()))
def is_filled():
    try:
        client.init_remote(block, "last")
    except tdserve.CapacityError:
        return False
    return True
client.delete("block-0")
wait_for(is_filled, "room for one more")
"""
"""Stores of a megabyte until there is no room; then room for one more, soon after one is deleted."""

PROGRESS = f"""{_WAIT}
from tdserve.cli.shell.options import open_catalog_client
client = open_catalog_client(None, None)
seen = lambda: (client.describe("transitions").inserts, client.describe("policy").version)
before = seen()
wait_for(lambda: all(now > then for now, then in zip(seen(), before)), "a new row and a new policy")
"""
"""Needs no torch, and so a second."""

EPISODE = f"""{_CONNECT}{_WAIT}
count = lambda: int((client.replay("episodes")[:]["actor"] == INDEX).sum())
before = count()
wait_for(lambda: count() > before, "an episode of actor INDEX")
"""
"""Of one actor, whose number replaces INDEX."""

ROUND_TRIP = f"""{_CONNECT}
from tdserve.base.config import ClientConfig
for transport in ("gloo", "shm"):
    with tdserve.connect(ClientConfig.from_env().address, transport=transport, timeout_s=60.0) as client:
        sent = TensorDict({{"a": torch.arange(NUM_BYTES // 8)}}, [])
        client.init_remote(sent, transport + "-NUM_BYTES")
        assert torch.equal(client.from_remote_init(transport + "-NUM_BYTES")["a"], sent["a"])
        print(client.stats()["transport"], "equal", flush=True)
"""
"""Over both transports, of NUM_BYTES."""

REFUSED = f"""{_CONNECT}
try:
    client.init_remote(TensorDict({{"a": torch.zeros(NUM_BYTES // 4)}}, []), "too-large")
except tdserve.CapacityError as error:
    print(error, flush=True)
"""
"""Asks for more bytes than there are."""

KILL_WORKERS = """
import os, pathlib
parents = {}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"tdserve.worker" in (process / "cmdline").read_bytes():
        parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
for pid, parent in parents.items():
    if parent in parents:  # the other one forks them
        os.kill(int(pid), 9)
        print("killed", pid)
"""

COUNT_ZOMBIES = """
import pathlib
stats = [path.read_text() for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
print(sum(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats))
"""

USE_ALL = f"""{_CONNECT}
import contextlib, time
row = TensorDict({{"n": torch.tensor(0)}}, [])
table = client.create_replay("priorities", like=row, capacity=100, sampler=tdserve.Prioritized())
table.extend(row.expand(10))
table.sample(4)
followers = client.create_replay("followers", like=row, capacity=100, policy="policy")
followers.extend(row.expand(10))
followers.sample(4)
with contextlib.suppress(tdserve.StoreExistsError):
    client.create_replay("followers", like=row, capacity=100)
with contextlib.suppress(tdserve.DeadlineExceededError):
    client.create_replay("empty", like=row, capacity=100).sample(4, timeout_s=1.0)
queue = client.create_queue("jobs", like=row, max_size=100)
queue.extend(row.expand(20))
with queue.take(4):
    print("all are used", flush=True)
    while True:
        time.sleep(0.5)
        table.sample(4)
        with contextlib.suppress(tdserve.StoreNotFoundError):
            client["nothing"]
"""
"""Uses all that the demo does not use, so that no panel of the dashboard is empty. Holds a lease until it is killed."""

QUERY = """
import json, urllib.parse, urllib.request
for query in json.loads({queries!r}):
    url = "http://prometheus:9090/api/v1/query?query=" + urllib.parse.quote(query)
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    print(len(found["data"]["result"]))
"""
"""Prints how many series each of ``queries``, as JSON, has."""

PAGE = """
import os, pathlib, urllib.request
token = pathlib.Path(os.environ["TDSERVE_TOKEN_FILE"]).read_text().strip()
request = urllib.request.Request("http://server:7708{path}", headers={{"Authorization": "Bearer " + token}})
with urllib.request.urlopen(request, timeout=30) as answer:
    print(answer.read().decode())
"""
"""Prints the page at ``path`` of the observer."""
