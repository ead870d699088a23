"""Steps of moves and checkpoints that outlive their sessions: nothing of them stays."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import PeerLostError
from tdserve.store.values.pinned_values import PinnedValues
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World, content_of, new_store

ID = f"{7:032x}"


def test_checkpoint_when_its_session_ends_while_values_are_copied_then_nothing_is_left(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    td, session = TensorDict({"a": torch.zeros(4), "s": "text"}, [4]), world.session()
    for request, name in enumerate("xy", 1):
        content = content_of(td, is_packed=True)
        asked = control_pb2.WriteRequest(store=name, new_store=new_store(name, td), content=content)
        run(world.writes.create(session, request, asked))
        world.stores.get(name)
    has_begun, may_go_on, copy = threading.Event(), threading.Event(), PinnedValues.copy

    def copy_slowly(values: PinnedValues, folder: Path) -> int:
        nbytes = copy(values, folder)
        has_begun.set()
        assert may_go_on.wait(20.0)
        return nbytes

    monkeypatch.setattr(PinnedValues, "copy", copy_slowly)

    async def scenario() -> None:
        asked = control_pb2.CheckpointRequest(checkpoint=ID, timeout_s=20.0, freeze=1 << 30)
        freezing = asyncio.create_task(world.services.moves.handlers["checkpoint"](session, 3, asked))
        await asyncio.to_thread(has_begun.wait, 20.0)
        assert world.root.checkpoint_folder(ID).exists()
        session.ended.set()
        await world.services.moves.on_session_ended(session.number)
        may_go_on.set()
        with pytest.raises(PeerLostError):
            await freezing

    run(scenario())
    assert not world.root.checkpoint_folder(ID).exists()


def test_seal_when_it_begins_only_after_its_session_has_ended_then_the_store_serves_again(
    world: World, run: Loop
) -> None:
    store, session = create(world, run), world.session()
    session.ended.set()
    run(world.services.moves.on_session_ended(session.number))
    asked = control_pb2.MoveRequest(store=store.name, move=ID, timeout_s=20.0)
    asked.seal = True
    run(world.services.moves.handlers["move"](session, 1, asked))
    assert world.stores.seals.find(store.name) is None
    store.check_present()
