from __future__ import annotations

from tdserve.base.errors import ConnectError, TDServeError
from tdserve.client.session.channels.group_inbox import MAX_NAMES, GroupInbox
from tdserve.v1 import control_pb2
from tests.memory import count_bytes


def event(epoch: int, key: str, name: str = "g") -> control_pb2.GroupEvent:
    """Returns an event with an entry of an epoch."""
    return control_pb2.GroupEvent(name=name, epoch=epoch, entry=control_pb2.Rendezvous(key=key))


class Listener:
    """A listener that records what an epoch receives."""

    def __init__(self, inbox: GroupInbox, epoch: int, name: str = "g") -> None:
        self.keys: list[str] = []
        self.lost: list[TDServeError] = []
        self.left: list[bool] = []
        inbox.attach(name, epoch, self.on_event, self.lost.append, self.on_leave)

    def on_leave(self, *, stays_connected: bool = False) -> None:
        """Records that the member has left."""
        self.left.append(stays_connected)

    def on_event(self, event: control_pb2.GroupEvent) -> None:
        """Records an event."""
        self.keys.append(event.entry.key)


def test_events_when_they_come_before_the_epoch_is_known_then_kept_in_order() -> None:
    inbox = GroupInbox()
    for key in ("a", "b"):
        inbox.on_event(event(1, key))
    inbox.on_event(event(1, "x", name="other"))
    listener = Listener(inbox, 1)
    inbox.on_event(event(1, "c"))
    assert listener.keys == ["a", "b", "c"]
    assert Listener(inbox, 1, "other").keys == ["x"]


def test_events_when_of_an_epoch_that_is_over_then_dropped() -> None:
    inbox = GroupInbox()
    inbox.on_event(event(1, "early"))
    second = Listener(inbox, 2)
    inbox.on_event(event(1, "late"))
    inbox.on_event(event(2, "in time"))
    inbox.detach("g", 2)
    inbox.detach("g", 2)
    inbox.on_event(event(2, "too late"))
    assert second.keys == ["in time"]
    assert Listener(inbox, 1).keys == []


def test_lose_when_the_session_ends_then_every_epoch_gets_the_error_and_later_ones_at_once() -> None:
    inbox, error = GroupInbox(), ConnectError(address="a")
    first, gone = Listener(inbox, 1), Listener(inbox, 5, "gone")
    inbox.detach("gone", 5)
    inbox.lose(error)
    assert (first.lost, gone.lost) == ([error], [])
    assert Listener(inbox, 2).lost == [error]


def test_leave_all_when_the_client_is_closed_then_connections_end_after_the_flush() -> None:
    inbox = GroupInbox()
    flushed: list[list[bool]] = []
    inbox.leave_all(lambda: flushed.append([]))
    assert flushed == []
    first, gone = Listener(inbox, 1), Listener(inbox, 5, "gone")
    inbox.detach("gone", 5)
    inbox.leave_all(lambda: flushed.append(list(first.left)))
    assert (flushed, first.left, gone.left) == ([[True]], [True, False], [])


def test_attach_when_groups_come_and_go_then_few_are_remembered_and_late_events_are_dropped() -> None:
    inbox, sizes = GroupInbox(), []
    for epoch in range(1, 4 * MAX_NAMES + 1):
        Listener(inbox, epoch, f"g{epoch}")
        inbox.detach(f"g{epoch}", epoch)
        inbox.on_event(event(epoch, "late", name=f"g{epoch}"))
        inbox.on_event(event(1, "late", name="g1"))
        if epoch % (MAX_NAMES // 4) == 0:
            sizes.append(count_bytes(inbox))
    assert max(sizes[8:]) <= 1.1 * max(sizes[:8])  # a dict grows by half now and then, and not again
    inbox.on_event(event(4 * MAX_NAMES + 1, "early"))
    assert Listener(inbox, 4 * MAX_NAMES + 1).keys == ["early"]
