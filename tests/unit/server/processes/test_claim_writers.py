from __future__ import annotations

import pytest

from tdserve.base.ids import CLIENT_ID_BYTES
from tdserve.server.processes.claim_writers import ClaimWriter, LocalWriter, WorkerWriter, make_claim_writer
from tdserve.store.rows.claim_file import ClaimedRows
from tests.unit.server.world import World

ONE, OTHER = bytes(CLIENT_ID_BYTES * [1]), bytes(CLIENT_ID_BYTES * [2])
EXTENDS = [ClaimedRows(ONE, request, 1) for request in (4, 5, 6)]


@pytest.mark.parametrize("writer", [LocalWriter("lock", ONE), WorkerWriter("worker-0")])
def test_make_claim_writer_when_recorded_then_the_same_writer(writer: ClaimWriter) -> None:
    assert make_claim_writer(writer.lock_name, writer.client_id) == writer


def test_local_writer_when_asked_then_it_writes_for_one_client_that_retries_its_last_extend(world: World) -> None:
    writer = LocalWriter("lock", ONE)
    with world.answers.begin_transaction(ONE, 5, b"an answer"):
        pass
    assert (writer.writer_id, writer.may_write_for(ONE), writer.may_write_for(OTHER)) == (ONE, True, False)
    assert not writer.is_overtaken(EXTENDS[1], world.answers)
    assert writer.select_retried(EXTENDS) == EXTENDS[-1:]
    assert writer.find_outdated(3) == 3
    assert not writer.describe_content(8).message_nbytes


def test_worker_writer_when_asked_then_it_writes_for_all_and_each_extend_may_be_retried(world: World) -> None:
    writer = WorkerWriter("worker-0")
    with world.answers.begin_transaction(ONE, 5, b"the answer to its retry"):
        pass
    assert (writer.writer_id, writer.may_write_for(ONE), writer.may_write_for(OTHER)) == (b"worker-0", True, True)
    assert [writer.is_overtaken(extend, world.answers) for extend in EXTENDS] == [False, True, False]
    assert writer.select_retried(EXTENDS) == EXTENDS
    assert writer.find_outdated(3) is None
    assert writer.describe_content(8).message_nbytes == [8]
