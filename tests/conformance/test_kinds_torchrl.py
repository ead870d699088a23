"""The kinds of torchrl over every transport, where it is installed."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest

import tdserve

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it deprecates its own classes when it is imported
    from torchrl.data.llm import History

from tests.conformance import kinds_torchrl
from tests.conformance.kind import Kind
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.kinds_torchrl import TORCHRL_KINDS
from tests.conformance.suite import Connect
from tests.sameness import assert_same

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Tokenizer:
    """The parts of a tokenizer that a template needs."""

    chat_template = "none"

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        """Returns the whole chat as one string."""
        return repr(conversation)


class TestTorchRLGloo(KindsSuite):
    kinds: ClassVar[dict[str, Kind]] = TORCHRL_KINDS

    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")

    def test_history_when_appended_sliced_and_restored_then_the_same_conversation(
        self, client: tdserve.Client, name: str
    ) -> None:
        history = kinds_torchrl.history(4)
        replay = client.create_replay(name, history[0], 16)
        index = replay.extend(history)
        with replay.writer(batch=2) as writer:
            writer.append(kinds_torchrl.history(6)[5])
        found = replay[index]
        assert type(found) is History
        assert found.role == history.role
        assert found.content == history.content
        assert_same(replay[1:3].exclude("index", "generation"), history[1:3])
        assert replay[4].content == "turn 4 of 6"
        whole = client.memmap(history, f"{name}-whole")
        assert_same(whole[1:3], history[1:3])
        more = whole.to_tensordict().append(kinds_torchrl.history(2)[1], inplace=False)
        assert more.content == [*history.content, "turn 0 of 2"]

    def test_classes_when_their_methods_are_called_then_as_of_the_original(
        self, client: tdserve.Client, name: str
    ) -> None:
        history, scores = kinds_torchrl.history(3), kinds_torchrl.scores()
        client.save(history, name)
        client.dumps(scores, f"{name}-scores")
        found, score = client.load(name), client.load_memmap(f"{name}-scores")
        assert found.fields() == history.fields()
        assert (found.device, found.default_spec(), found.get("role")) == (
            history.device,
            history.default_spec(),
            history.role,
        )
        assert found.apply_chat_template(tokenizer=Tokenizer()) == history.apply_chat_template(tokenizer=Tokenizer())
        chats = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]]
        client.init_remote(History.from_chats(chats), f"{name}-chats")
        assert_same(client.from_remote_init(f"{name}-chats"), History.from_chats(chats))
        for mine, theirs in ((found, history), (score, scores)):
            cls = type(theirs)
            assert_same(cls.from_tensordict(mine.to_tensordict()), cls.from_tensordict(theirs.to_tensordict()))
            for join in (cls.stack, cls.lazy_stack, cls.maybe_dense_stack):
                assert_same(join([mine, mine]), join([theirs, theirs]))
        assert score.state_dict().keys() == scores.state_dict().keys()
        assert found[0].state_dict().keys() == history[0].state_dict().keys()
        for mine, theirs in zip(found.unbind(0), history.unbind(0), strict=True):
            assert_same(mine, theirs)
        client.load_(into := history.clone(), name)
        assert_same(into, history)

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
