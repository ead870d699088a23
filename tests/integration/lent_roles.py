"""Roles of clients of another user, who may not enter the server's root."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.local.root_files import LentFiles
from tdserve.store.rows.generations import FILE_NAME
from tests.integration.local_roles import NUM_ROWS, TIMEOUT_S, Say, numbers_in, rows

LARGE_NBYTES = 3 << 20
"""More than a message without a channel carries."""


def _become(uid: int, address: str, token: str) -> None:
    """Takes a user's rights. Imports everything first, because that user may not read where the modules lie."""
    with tdserve.connect(address, transport="shm", token=token) as client:
        client.replay("r").sample(1)
        client.latest("w")
    with tdserve.connect(address, transport="gloo", token=token) as client:
        client.replay("r").sample(1)
    torch.set_num_threads(1)  # a forked process must not use the threads of its parent
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def use_all(say: Say, address: str, uid: int, token: str, transport: Any) -> None:
    """Reads and writes stores of every kind."""
    _become(uid, address, token)
    with tdserve.connect(address, transport=transport, token=token, timeout_s=TIMEOUT_S) as client:
        replay, kv, store = client.replay("r"), client.kv("kv"), client["td"]
        assert isinstance(store, tdserve.StoreHandle)
        say("transport", client.stats()["transport"])
        say("sampled", *sorted(set(numbers_in(replay.sample(50)))))
        say("read", *numbers_in(replay[:2]), *numbers_in(store[:2]), *numbers_in(store[0]))
        say("extended", *replay.extend(rows(2, 2, text="text")).tolist())
        say("early", *replay.extend(rows(2, 2, text="text"), return_early=True).result(TIMEOUT_S).tolist())
        say("rows", *numbers_in(replay[:]))
        store[:2] = rows(2, 2, text="text")
        say("written", *numbers_in(store[:]))
        say("published", client.publish("w", rows(2)))
        for copy in (True, False):
            weights = client.latest("w", copy=copy)
            assert weights is not None
            say("latest", weights.version, *sorted(set(numbers_in(weights.data))))
        kv["large"] = torch.ones(LARGE_NBYTES // 4)
        say("entries", int(kv["large"].sum()), int(kv["small"].sum()))
        client.init_remote(rows(2), "new")
        say("new", *sorted(set(numbers_in(client.from_remote_init("new")))))
        client.delete("new")
        client.init_remote(rows(3), "new")
        say("again", *sorted(set(numbers_in(client.from_remote_init("new")))))
        say("checked", *numbers_in(client["checked"][:2]))
        claimed = TensorDict({"x": torch.zeros(4)}, [4])
        mine = client.create_replay("mine", claimed[0], 100)
        say("many", sum(len(mine.extend(claimed)) for _ in range(50)))


def use_adopted(say: Say, address: str, uid: int, token: str) -> None:
    """Reads a store whose files lie in a folder of somebody."""
    _become(uid, address, token)
    with tdserve.connect(address, token=token, timeout_s=TIMEOUT_S) as client:
        say("read", *numbers_in(client["td"][:2]), client.stats()["transport"])
        say("adopted", *numbers_in(client["adopted"][:2]), client.stats()["transport"])
        say("why", client.stats()["why_not_shm"])
        say("read", *numbers_in(client["td"][:2]))


def go_elsewhere(say: Say, address: str, uid: int, token: str) -> None:
    """Tries to reach all else in the root from the folder that it was lent."""
    _become(uid, address, token)
    with tdserve.connect(address, transport="shm", token=token, timeout_s=TIMEOUT_S) as client:
        say("read", *sorted(set(numbers_in(client.replay("r")[:]))))
        local = client.session(client.make_deadline(None)).local
        assert local is not None
        assert isinstance(local.files, LentFiles)
        lent = local.files.open_folder("r")
        folder = lent.path
        say("folder", FILE_NAME in os.listdir(folder))
        tries: list[Callable[[], Any]] = [
            lambda: os.listdir(folder / ".."),
            lambda: os.listdir(folder / "../td"),
            (folder / "../td" / FILE_NAME).read_bytes,
            (folder / "../../catalog/data.mdb").read_bytes,
            lambda: os.listdir(folder / "../../sessions"),
            lambda: (folder / FILE_NAME).open("r+b"),
            lambda: (folder / "mine").write_bytes(b""),
            lambda: local.files.open_folder("td"),
            lambda: local.files.open_folder("../td"),
            lambda: client["td"][:],
        ]
        for attempt in tries:
            try:
                say("done", attempt())
            except (OSError, tdserve.TDServeError) as error:
                say("refused", type(error).__name__)
        del lent
        say("end", NUM_ROWS)
