"""The owner of a name knows a store that is elsewhere, for example one from before the owner joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import ConnectError, StoreExistsError
from tdserve.rules.placement import DIRECTORY, choose_owner
from tests.integration.cluster.losing import connecting, fill_each, rows
from tests.integration.cluster.names import name_owned_by, next_name
from tests.integration.crashing import Crashing
from tests.integration.token_files import TokenFile
from tests.processes import wait_for

pytestmark = pytest.mark.integration

OWNER_AWAY = "server 0 does not answer and may hold"

CONTENT = TensorDict({"number": torch.arange(3)}, [3])


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[list[Crashing]]:
    """Three servers, of which clients know two at first."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crashing(tmp_path / f"root{number}")) for number in range(3)]


def create_before_the_third_joins(growing: list[Crashing]) -> str:
    """Creates a store at the first server; the third will be the owner of its name. Returns the name."""
    name = next(name for name in iter(lambda: name_owned_by(0, 2), None) if choose_owner(name, 3) == 2)
    with connecting(growing[:2]) as client:
        client.init_remote(CONTENT, name)
    return name


@pytest.mark.slow
def test_store_when_a_server_has_joined_and_its_own_is_away_then_not_created_a_second_time(
    growing: list[Crashing],
) -> None:
    name = create_before_the_third_joins(growing)
    with connecting(growing) as client:
        client.init_remote(CONTENT, name_owned_by(1, 3))
    growing[0].kill()
    with connecting(growing, timeout_s=5.0) as client:
        with pytest.raises(ConnectError, match=f"server 0, which has the name '{name}'"):
            client.init_remote(CONTENT, name)
        with pytest.raises(ConnectError):
            client.create_replay(name, CONTENT[0], 10, exists_ok=True)
        client.init_remote(CONTENT, name_owned_by(2, 3))
    growing[0].start()
    with connecting(growing) as client:
        assert client.from_remote_init(name)["number"].tolist() == [0, 1, 2]
        with pytest.raises(StoreExistsError):
            client.init_remote(CONTENT, name)


@pytest.mark.slow
def test_creation_when_a_server_joins_while_another_is_away_then_raises_until_all_answer(
    growing: list[Crashing],
) -> None:
    name = create_before_the_third_joins(growing)
    growing[0].kill()
    fresh = name_owned_by(2, 3)
    with connecting(growing, timeout_s=5.0) as client:
        for each in (name, fresh):
            with pytest.raises(ConnectError, match=OWNER_AWAY):
                client.init_remote(CONTENT, each)
        growing[0].start()
        wait_for(lambda: not client.members.is_lost(0), "the first server")
        client.init_remote(CONTENT, fresh)
        assert client.from_remote_init(name)["number"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_creation_when_a_server_was_never_there_then_done_at_the_others(growing: list[Crashing]) -> None:
    growing[0].kill()
    with connecting(growing, timeout_s=5.0) as client:
        name = name_owned_by(2, 3)
        client.init_remote(CONTENT, name)
        assert client.find_server(name) == 2
        with pytest.raises(ConnectError, match="server 0, which decides about the name"):
            client.init_remote(CONTENT, name_owned_by(0, 3))


@pytest.mark.slow
def test_shared_store_when_a_server_has_joined_and_its_own_is_away_then_found_by_a_copy(
    growing: list[Crashing],
) -> None:
    name = next(name for name in iter(lambda: name_owned_by(0, 2), None) if choose_owner(name, 3) == 2)
    with connecting(growing[:2]) as client:
        table = client.create_replay(name, rows(1)[0], 300, shards="all")
        for writer in range(1, 20):
            table.extend(rows(1, writer), writer=writer)
    with connecting(growing) as client:
        client.init_remote(CONTENT, next_name())
    growing[0].kill()
    with connecting(growing, timeout_s=5.0) as client:
        assert client.replay(name).info()["degraded"] == [0]
        again = client.create_replay(name, rows(1)[0], 300, shards="all", exists_ok=True)
        assert 0 < len(again) < 19
    growing[0].start()
    with connecting(growing) as client:
        assert sorted(client.replay(name)[:]["number"].tolist()) == [*range(1, 20)]


@pytest.mark.slow
def test_part_when_it_moves_to_the_owner_that_has_joined_then_found_there(
    growing: list[Crashing],
) -> None:
    name = next(name for name in iter(next_name, None) if choose_owner(name, 3) == 2)
    with connecting(growing[:2]) as client:
        table = client.create_replay(name, rows(1)[0], 300, shards=2)
        for number in range(20):
            table.extend(rows(1, number), writer=number)
    with connecting(growing) as client:
        client.init_remote(CONTENT, name_owned_by(2, 3))  # the owners of names learn of the table
        assert sorted(client.drain(0) + client.drain(1)) == [f"{name}#0", f"{name}#1"]
        assert sorted(client.replay(name)[:]["number"].tolist()) == list(range(20))
        assert client.rebalance(f"{name}#0", 1) == 1
        with pytest.raises(StoreExistsError):
            client.create_replay(name, rows(1)[0], 300)
        client.delete(name)
        assert name not in client


@pytest.mark.slow
def test_restore_when_under_a_prefix_then_owners_of_the_new_names_lead_there(
    growing: list[Crashing], tmp_path: Path
) -> None:
    kept, moved = "again-", name_owned_by(0, 3)
    while choose_owner(kept + moved, 3) == 0:
        moved = name_owned_by(0, 3)
    with connecting(growing) as client:
        client.init_remote(CONTENT, moved)
        fill_each(client.create_replay("rows", rows(1)[0], 300, shards="all"))
        client.checkpoint(tmp_path / "place")
        assert kept + moved in client.restore(tmp_path / "place", prefix=kept)
        assert sorted(client.replay("again-rows")[:]["number"].tolist()) == [*range(30)]
    growing[0].kill()
    with connecting(growing, timeout_s=5.0) as client, pytest.raises(ConnectError, match="server 0, which has"):
        client.init_remote(CONTENT, kept + moved)


@pytest.mark.slow
def test_note_of_the_number_of_servers_then_no_store_of_anybody(growing: list[Crashing]) -> None:
    with connecting(growing) as client:
        client.init_remote(CONTENT, "settings")
        assert client.stores() == ["settings"]
        with pytest.raises(tdserve.InvalidRequestError):
            client.init_remote(CONTENT, DIRECTORY)
    for each in growing:
        with tdserve.connect(each.server.address) as alone:
            assert alone.stores() == (["settings"] if choose_owner("settings", 3) == growing.index(each) else [])


@pytest.mark.slow
def test_creation_when_the_token_grants_some_names_then_done_without_the_note(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    some, every = tokens.add("some", "write", stores=["jobs-*"]), tokens.add("every", "admin")
    with ExitStack() as stack:
        started = [
            stack.enter_context(tdserve.Server(tmp_path / f"root{number}", tokens_file=str(tokens.path)))
            for number in range(2)
        ]
        address = ",".join(server.address for server in started)
        for number in range(2):
            name = next(name for name in map("jobs-{}".format, range(100)) if choose_owner(name, 2) == number)
            with tdserve.connect(address, token=some) as client:
                client.init_remote(CONTENT, name)
                client.create_replay(f"{name}-rows", CONTENT[0], 10, shards="all")
        with tdserve.connect(address, token=every) as client:
            client.init_remote(CONTENT, "settings")
            assert client["settings"]["number"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_weights_when_a_server_has_joined_and_their_own_is_away_then_not_published_elsewhere(
    growing: list[Crashing],
) -> None:
    name = next(name for name in iter(lambda: name_owned_by(0, 2), None) if choose_owner(name, 3) == 2)
    with connecting(growing[:2]) as client:
        client.publish(name, CONTENT)
        client.create_kv(next_name())  # all names of the two are looked through
    growing[0].kill()
    with (
        connecting(growing, timeout_s=5.0) as client,
        pytest.raises(ConnectError, match=OWNER_AWAY),
    ):
        client.publish(name, CONTENT)
    growing[0].start()
    with connecting(growing) as client:
        assert client.publish(name, CONTENT) == 2
