"""The control process's side of groups: it forms epochs, passes entries on, and reports losses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, DeadlineExceededError, NotSupportedError
from tdserve.base.ids import check_store_name, check_text, make_secret
from tdserve.rules.group_rule import Ask, Epoch, GroupRule, check_backend
from tdserve.server.execution import inline_tasks
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.session_limits import MAX_REASON, is_short
from tdserve.v1 import control_pb2

MAX_GROUPS = 10_000
"""Most groups of one server; each takes some kilobytes while it has a member."""

_Formed = asyncio.Future["control_pb2.GroupFormed"]


class _Group:
    """A group, with the sessions that are members or have asked to be."""

    def __init__(self, name: str) -> None:
        self.rule = GroupRule(name)
        self.sessions: dict[int, ClientSession] = {}
        self.waiting: dict[int, _Formed] = {}


class Groups:
    """The groups of a server by name. They are not persisted: a restart ends every session, and with it every epoch."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    async def join(self, session: ClientSession, request: int, asked: control_pb2.JoinGroup) -> None:
        """Answers with the next epoch of a group once it is formed.

        Raises:
            InvalidRequestError: The request contradicts itself or those of other members, or claims an epoch that can
                never have been.
            WrongStateError: This session is waiting for this group already.
            NotSupportedError: Two members of an nccl group share a GPU, or the client may not be linked to others.
            CapacityError: The server has ``MAX_GROUPS`` already.
            DeadlineExceededError: The other members did not ask in time.
        """
        check_store_name(asked.name)
        check_text("device", asked.device)
        if asked.name not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise CapacityError(what="groups of one server", asked=1, free=0)
        check_backend(asked.backend)
        if session.why_unlinked:
            raise NotSupportedError(feature=f"group {asked.name!r}", reason=session.why_unlinked)
        deadline = Deadline.after(asked.timeout_s)
        await inline_tasks.ensure_task()
        group = self._groups.setdefault(asked.name, _Group(asked.name))
        formed: _Formed = asyncio.get_running_loop().create_future()
        try:
            group.rule.ask(_ask_of(session, asked))
            group.sessions[session.number] = session
            group.waiting[session.number] = formed
            self._form(group)
            with session.mark_waiting():
                answer = await _wait_in_time(formed, deadline, lambda: _describe_awaited(group))
        except asyncio.CancelledError:
            if _has_result(formed):  # it is a member already: the others must learn that it is gone
                self._lose(group, session.number, "it was cancelled")
            raise
        finally:
            if group.waiting.get(session.number) is formed:
                del group.waiting[session.number]
                group.rule.withdraw(session.number)
            self._tidy(group, session.number)
        session.send(control_pb2.ServerMessage(request=request, group_formed=answer))

    def on_notice(self, session: ClientSession, notice: control_pb2.GroupNotice) -> None:
        """Passes a member's notice on to the others; ignores a notice of an epoch that is over."""
        group = self._groups.get(notice.name)
        if group is None:
            return
        others = group.rule.list_others(session.number, notice.epoch)
        event = control_pb2.GroupEvent(name=notice.name, epoch=notice.epoch)
        kind = notice.WhichOneof("body")
        if kind == "entry" and not is_short(notice.entry):
            return
        if kind == "entry":
            event.entry.CopyFrom(notice.entry)
        elif session.number in group.rule.epoch.members:
            others = [other for other in others if other not in group.waiting]  # those have left this epoch already
            event.loss.rank = group.rule.get_rank(session.number)
            event.loss.reason = notice.given_up[:MAX_REASON] if kind == "given_up" else "it has closed the group"
            has_finished = notice.HasField("num_finished")
            event.loss.has_left = not notice.is_busy and (has_finished or kind == "leave")
            event.loss.has_given_up = kind == "given_up"
            if has_finished:
                event.loss.num_finished = notice.num_finished
        _send_event(group, others, event)
        if kind == "leave" and notice.epoch == group.rule.epoch.number and session.number not in group.waiting:
            self._remove(group, session.number)

    def on_session_ended(self, number: int) -> None:
        """Reports the end of a session at once to the other members of its groups."""
        for group in list(self._groups.values()):
            if number in group.sessions:
                self._lose(group, number, "its session has ended")

    def _lose(self, group: _Group, number: int, reason: str) -> None:
        epoch = group.rule.epoch
        others = group.rule.list_others(number, epoch.number)
        if others:
            event = control_pb2.GroupEvent(name=group.rule.name, epoch=epoch.number)
            event.loss.rank = group.rule.get_rank(number)
            event.loss.reason = reason
            _send_event(group, others, event)
        self._remove(group, number)

    def _remove(self, group: _Group, number: int) -> None:
        group.rule.leave(number)
        self._form(group)
        self._tidy(group, number)

    def _tidy(self, group: _Group, number: int) -> None:
        """Forgets a session that is neither a member nor waiting, and a group that has neither."""
        if number not in group.waiting and not group.rule.is_living(number):
            group.sessions.pop(number, None)
        if group.rule.is_over and not group.waiting and self._groups.get(group.rule.name) is group:
            del self._groups[group.rule.name]

    def _form(self, group: _Group) -> None:
        """Forms the next epoch, if it can be formed now."""
        asking = set(group.waiting)
        try:
            epoch = group.rule.form()
        except NotSupportedError as error:
            for number in asking:
                if (future := group.waiting.pop(number, None)) is not None and not future.done():
                    future.set_exception(error)
                group.rule.withdraw(number)
            return
        if epoch is not None:
            _announce(group, epoch)


def _announce(group: _Group, epoch: Epoch) -> None:
    members = [
        control_pb2.GroupMember(host=group.sessions[number].hello.host, pid=group.sessions[number].hello.pid)
        for number in epoch.members
    ]
    secret = make_secret()
    answers = [
        control_pb2.GroupFormed(epoch=epoch.number, rank=rank, members=members, secret=secret)
        for rank in range(len(members))
    ]
    for number, answer in zip(epoch.members, answers, strict=True):  # all or none: one that fails changes no session
        group.sessions[number].last_epoch = epoch.number
        future = group.waiting.pop(number)
        if not future.done():
            future.set_result(answer)


def _send_event(group: _Group, numbers: list[int], event: control_pb2.GroupEvent) -> None:
    for number in numbers:
        session = group.sessions.get(number)
        if session is not None and not session.ended.is_set():
            session.send(control_pb2.ServerMessage(group_event=event))


def _ask_of(session: ClientSession, asked: control_pb2.JoinGroup) -> Ask:
    return Ask(
        session.number,
        world_size=asked.world_size,
        rank=asked.rank if asked.HasField("rank") else None,
        backend=asked.backend,
        device=f"{session.hello.boot_id or session.hello.host} {asked.device}" if asked.device else "",
        epoch=asked.epoch,
        last_rank=asked.last_rank,
        last_world_size=asked.last_world_size,
        above=session.last_epoch,
    )


async def _wait_in_time(formed: _Formed, deadline: Deadline, what: Callable[[], str]) -> control_pb2.GroupFormed:
    done, _ = await asyncio.wait([formed], timeout=deadline.remaining_s)
    if not done:
        timeout_s = None if deadline.timeout_s is None else round(deadline.timeout_s, 2)
        raise DeadlineExceededError(what=what(), timeout_s=timeout_s)
    return formed.result()


def _describe_awaited(group: _Group) -> str:
    return f"the next epoch of group {group.rule.name!r} ({group.rule.describe_missing()})"


def _has_result(formed: _Formed) -> bool:
    return formed.done() and not formed.cancelled() and formed.exception() is None
