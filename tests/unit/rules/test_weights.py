from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tdserve.base.errors import CorruptDataError, InvalidRequestError, VersionNotFoundError, WrongStateError
from tdserve.rules.weights import MAX_CHECKSUMMED, MAX_PASSED_OVER, MIN_SHARE, UnfinishedVersion, Versions
from tests.state_machines import make_tests


class _AgainstFiles(RuleBasedStateMachine):
    """The rule beside a folder in memory. Every step checks who may touch which file."""

    publishings = Bundle("publishings")

    def __init__(self) -> None:
        super().__init__()
        self.versions = Versions(2)
        self.files: dict[int, bytes] = {}  # version -> structure of its file
        self.open: set[UnfinishedVersion] = set()
        self.names: set[str] = set()
        self.readers: dict[int, int] = {}
        self.last = 0

    def _delete(self, drops: tuple[int, ...]) -> None:
        for version in drops:
            assert version not in self.readers, "a file that is being read was deleted"
            assert version not in self._kept()
            self.files.pop(version, None)

    def _kept(self) -> list[int]:
        return [record.version for record in self.versions.kept]

    @rule(target=publishings, fingerprint=st.sampled_from([b"a", b"a", b"b"]))
    def begin(self, fingerprint: bytes) -> UnfinishedVersion:
        publishing = self.versions.begin(fingerprint=fingerprint)
        assert publishing.name not in self.names, "a name was used twice"
        self.names.add(publishing.name)
        if publishing.recycles is not None:
            assert publishing.recycles not in self.readers, "a file that is being read was recycled"
            assert publishing.recycles not in self._kept()
            assert self.files.pop(publishing.recycles) == fingerprint
        self._delete(publishing.drops)
        self.open.add(publishing)
        return publishing

    def _is_open(self, publishing: UnfinishedVersion, event: Any) -> bool:
        if publishing in self.open:
            self.open.remove(publishing)
            return True
        with pytest.raises(WrongStateError):
            event()
        return False

    @rule(publishing=publishings)
    def commit(self, publishing: UnfinishedVersion) -> None:
        if self._is_open(publishing, lambda: self.versions.commit(publishing, 1.0, nbytes=8)):
            drops = self.versions.commit(publishing, 1.0, nbytes=8)
            self.last += 1
            self.files[self.last] = publishing.fingerprint
            self._delete(drops)
            assert self.versions.newest == self.versions.get(self.last), "a number was skipped, or used twice"

    @rule(publishing=publishings)
    def abort(self, publishing: UnfinishedVersion) -> None:
        if self._is_open(publishing, lambda: self.versions.abort(publishing)):
            self._delete(self.versions.abort(publishing))

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        if self._kept():
            version = data.draw(st.sampled_from(self._kept()))
            assert self.versions.acquire(version).version == version
            self.readers[version] = self.readers.get(version, 0) + 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.readers:
            version = data.draw(st.sampled_from(sorted(self.readers)))
            self.readers[version] -= 1
            if not self.readers[version]:
                del self.readers[version]
            self._delete(self.versions.release(version))

    @rule(keep=st.integers(1, 3))
    def set_keep(self, keep: int) -> None:
        self._delete(self.versions.set_keep(keep))

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.versions.get_state()))
        kept = self.versions.kept
        self.versions = Versions.restore(state)
        assert self.versions.kept == kept
        assert self.versions.get_state() == state
        self.readers.clear()
        self.open.clear()
        self._delete(tuple(self.files.keys() - set(self.versions.files)))

    @invariant()
    def holds(self) -> None:
        kept = self._kept()
        assert kept == sorted(kept)
        assert len(kept) <= self.versions.keep
        assert set(kept) <= self.files.keys(), "a readable version lost its file"
        assert self.readers.keys() <= self.files.keys(), "a reader lost its file"
        assert all(self.versions.count_readers(version) == num for version, num in self.readers.items())
        assert self.files.keys() <= set(self.versions.files), "a file was forgotten on disk"
        spare = len(self.files) - len(self.readers.keys() | set(kept))
        assert spare <= self.versions.keep + 1, "too many files are kept for recycling"


TestAgainstFiles, TestAgainstFilesWithAllExamples = make_tests(_AgainstFiles, num_examples=80, num_steps=40)


def _publish(versions: Versions, fingerprint: bytes = b"f") -> int | None:
    publishing = versions.begin(fingerprint=fingerprint)
    versions.commit(publishing, 1.0, nbytes=4)
    return publishing.recycles


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_publish_when_no_client_reads_then_recycles_from_keep_plus_two_on(keep: int) -> None:
    versions = Versions(keep)
    recycled = [_publish(versions) for _ in range(keep + 4)]
    assert recycled == [None] * (keep + 1) + [1, 2, 3]


def test_publish_when_a_reader_holds_a_retired_version_then_its_file_is_left_alone() -> None:
    versions = Versions(2)
    _publish(versions)
    versions.acquire(1)
    assert [_publish(versions) for _ in range(4)] == [None, None, None, 2]
    versions.release(1)
    assert _publish(versions) in (1, 3)


def test_publish_when_the_structure_changes_then_no_file_is_recycled_and_the_free_ones_are_dropped() -> None:
    versions = Versions(1)
    for _ in range(2):
        _publish(versions)
    publishing = versions.begin(fingerprint=b"other")
    assert (publishing.recycles, publishing.drops) == (None, (1,))


def test_commit_when_two_overlap_then_the_one_that_is_whole_later_is_newest() -> None:
    versions = Versions(2)
    first, second = versions.begin(fingerprint=b"f"), versions.begin(fingerprint=b"f")
    versions.commit(second, 5.0, nbytes=4)
    versions.commit(first, 6.0, nbytes=4, metadata=b"m")
    assert versions.newest == versions.get(2)
    assert versions.get(2).metadata == b"m"
    assert [record.version for record in versions.kept] == [1, 2]


def test_abort_when_a_file_was_to_be_recycled_then_it_is_dropped_and_no_number_is_spent() -> None:
    versions = Versions(1)
    for _ in range(2):
        _publish(versions)
    publishing = versions.begin(fingerprint=b"f")
    assert publishing.recycles == 1
    assert versions.abort(publishing) == (1,)
    assert versions.next_number == 3


def test_restore_when_a_version_was_begun_then_its_number_goes_to_the_next() -> None:
    versions = Versions(1)
    _publish(versions)
    lost = versions.begin(fingerprint=b"f")
    again = Versions.restore(versions.get_state())
    assert again.next_number == 2
    assert again.begin(fingerprint=b"f").name != lost.name


@pytest.mark.parametrize("version", [0, 1, 4])
def test_acquire_when_not_kept_then_the_error_lists_kept_versions(version: int) -> None:
    versions = Versions(2)
    for _ in range(3):
        _publish(versions)
    with pytest.raises(VersionNotFoundError, match="kept now: 2, 3"):
        versions.acquire(version)


def test_release_when_no_client_reads_then_refused() -> None:
    versions = Versions()
    _publish(versions)
    with pytest.raises(WrongStateError, match=r"^releasing it is not possible while version 1 has no readers$"):
        versions.release(1)


def test_release_when_many_files_come_free_then_at_most_keep_plus_one_wait_for_recycling() -> None:
    versions = Versions(1)
    for version in range(1, 7):
        _publish(versions)
        versions.acquire(version)
    drops = [versions.release(version) for version in range(1, 6)]
    assert drops == [(), (), (1,), (2,), (3,)]
    assert versions.files == (4, 5, 6)


def test_restore_when_a_reader_held_a_retired_version_then_its_file_is_recycled() -> None:
    versions = Versions(1)
    _publish(versions)
    versions.acquire(1)
    _publish(versions)
    again = Versions.restore(versions.get_state())
    assert again.files == (1, 2)
    assert _publish(again) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_hold_when_a_version_has_a_file_then_that_is_left_alone_until_it_is_released(version: int) -> None:
    versions = Versions(1)
    for _ in range(2):
        _publish(versions)
    again = Versions.restore(versions.get_state())
    assert again.hold(version)
    assert not again.hold(3)
    for _ in range(3):
        assert _publish(again) != version
        assert version in again.files
    again.release(version)
    assert version in {_publish(again) for _ in range(3)}


def test_restore_when_versions_differ_in_the_order_of_keys_then_each_has_its_own() -> None:
    versions = Versions(2)
    for order in ("", "0b", ""):
        versions.commit(versions.begin(fingerprint=b"a", order=order), 0.0, nbytes=1)
    state = json.loads(json.dumps(versions.get_state()))
    again = Versions.restore(state)
    assert [record.order for record in again.kept] == ["0b", ""]
    older = {key: content for key, content in state.items() if key != "orders"}
    assert [record.order for record in Versions.restore(older).kept] == ["", ""]


def test_newest_when_nothing_was_published_then_none() -> None:
    assert Versions().newest is None


def test_checksums_when_a_version_is_retired_then_known_still_but_not_made_known_any_more() -> None:
    versions = Versions(1)
    for _ in range(2):
        _publish(versions)
    assert not versions.set_checksums(1, b"late")
    assert versions.set_checksums(2, b"two")
    _publish(versions)
    known = versions.get_checksums(2)
    assert known is not None
    assert known.content == b"two"
    assert (versions.get_checksums(1), versions.get_checksums(3)) == (None, None)
    assert (versions.find_checksums_before(3), versions.find_checksums_before(2)) == ((2, known), None)
    assert Versions.restore(json.loads(json.dumps(versions.get_state()))).get_checksums(2) == known


def test_checksums_when_of_many_versions_then_only_the_last_are_known() -> None:
    versions = Versions(MAX_CHECKSUMMED + 5)
    for version in range(1, MAX_CHECKSUMMED + 3):
        _publish(versions)
        versions.set_checksums(version, b"%d" % version)
    assert [version for version in range(1, 20) if versions.get_checksums(version)] == list(
        range(3, MAX_CHECKSUMMED + 3)
    )


def _looked_at(versions: Versions, num_versions: int, *, share: float) -> list[int]:
    """Returns which of the next versions get checksums, if each shares this much with the one compared before."""
    found = list[int]()
    for _ in range(num_versions):
        _publish(versions)
        version = versions.files[-1]
        if versions.is_worth_checksums(version):
            before = versions.find_checksums_before(version)
            versions.set_checksums(version, b"")
            if before is not None:
                versions.note_unchanged(version, before[0], share=share)
            found.append(version)
    return found


def test_is_worth_checksums_when_everything_changes_time_after_time_then_ever_rarer_until_something_stays() -> None:
    versions = Versions()
    assert _looked_at(versions, 20, share=0.0) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 14, 15]
    assert len(_looked_at(versions, 1000, share=MIN_SHARE / 2)) < 50
    assert len(_looked_at(versions, MAX_PASSED_OVER + 100, share=MIN_SHARE)) >= 100
    assert not versions.is_mostly_unchanged


@pytest.mark.parametrize("is_mostly_unchanged", [False, True])
def test_is_worth_checksums_when_each_version_has_a_successor_too_soon_then_ever_rarer_unless_readers_wait_for_them(
    is_mostly_unchanged: bool,
) -> None:
    versions = Versions()
    _looked_at(versions, 2, share=1.0 if is_mostly_unchanged else 0.0)
    num_begun = 0
    for _ in range(1000):
        _publish(versions)
        if versions.is_worth_checksums(versions.files[-1]):
            num_begun += 1
            versions.note_superseded(versions.files[-1])
    assert num_begun == 1000 if is_mostly_unchanged else num_begun < 50
    _looked_at(versions, 2 * MAX_PASSED_OVER, share=1.0)  # the publisher has slowed down
    assert versions.is_mostly_unchanged


def test_restore_when_the_state_is_of_a_server_without_checksums_then_none_are_known() -> None:
    versions = Versions()
    _publish(versions)
    state = versions.get_state()
    del state["checksums"]
    assert Versions.restore(state).get_checksums(1) is None


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_when_it_cannot_be_then_refused(keep: Any) -> None:
    with pytest.raises(InvalidRequestError):
        Versions(keep)


@pytest.mark.parametrize(
    "change",
    [{"keep": "2"}, {"last_begun": 0}, {"kept": [[1, 2]]}, {"kept": [[1, 4, 1.0, "?", ""]]}, {"free": [[2, ""]]}],
)
def test_restore_when_the_state_is_damaged_then_corrupt(change: dict[str, Any]) -> None:
    versions = Versions()
    _publish(versions)
    _publish(versions)
    with pytest.raises(CorruptDataError):
        Versions.restore({**versions.get_state(), **change})


def test_is_unused_when_nothing_was_committed_and_nothing_is_begun_then_so() -> None:
    versions = Versions()
    assert versions.is_unused
    first = versions.begin(fingerprint=b"a")
    assert not versions.is_unused
    versions.abort(first)
    assert versions.is_unused
    versions.commit(versions.begin(fingerprint=b"a"), 1.0, nbytes=1)
    assert not versions.is_unused
