"""The kinds of torchrl over every transport; ``test_kinds_torchrl`` runs this in a process of its own."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torchrl.data.llm import History

import tdserve
from tests.conformance import kinds_torchrl
from tests.conformance.kind import KINDS, Kind
from tests.conformance.kinds_suite import Connect, KindsSuite
from tests.sameness import assert_same

OWN = {name: kind for name, kind in KINDS.items() if kind.make.__module__ == kinds_torchrl.__name__}


class TestTorchRLGloo(KindsSuite):
    kinds: ClassVar[dict[str, Kind]] = OWN

    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")

    def test_history_when_appended_sliced_and_restored_then_the_same_conversation(
        self, client: tdserve.Client, name: str
    ) -> None:
        told = kinds_torchrl.history(4)
        replay = client.create_replay(name, told[0], 16)
        index = replay.extend(told)
        with replay.writer(batch=2) as writer:
            writer.append(kinds_torchrl.history(6)[5])
        found = replay[index]
        assert type(found) is History
        assert found.role == told.role
        assert found.content == told.content
        assert_same(replay[1:3].exclude("index", "generation"), told[1:3])
        assert replay[4].content == "turn 4 of 6"
        whole = client.memmap(told, f"{name}-whole")
        assert_same(whole[1:3], told[1:3])
        more = whole.to_tensordict().append(kinds_torchrl.history(2)[1], inplace=False)
        assert more.content == [*told.content, "turn 0 of 2"]

    def test_scores_when_rows_differ_then_each_has_its_own(self, client: tdserve.Client, name: str) -> None:
        client.init_remote(kinds_torchrl.scores_stacked(), name)
        for number in range(4):
            found = client[name][number]["score"]
            assert type(found) is type(kinds_torchrl.scores())
            assert len(found.inst_level_strict_acc) == number + 1


class TestTorchRLSharedMemory(TestTorchRLGloo):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="shm")
