"""The way into an epoch: a member requests it, waits for the others, and connects to them."""

from __future__ import annotations

from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import TDServeError
from tdserve.base.ids import check_store_name
from tdserve.client.content.devices import resolve_device
from tdserve.client.groups.epoch import GroupEpoch
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.channels.network_interface import find_offered_address
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.rules.group_rule import BACKENDS, check_backend
from tdserve.transport.group_nccl import check_available
from tdserve.v1 import control_pb2


class GroupAsk:
    """A member's request, which is repeated for each epoch.

    Args:
        client: Provides the sessions.
        name: Name of the group.
        backend: ``"gloo"`` or ``"nccl"``.
        device: CUDA device of the backend nccl; None is the current one.
        interface: Address at which the other members reach this one. None uses the interface that reaches the server,
            or if that is loopback and some members are on other machines, one that leads to other machines.

    Raises:
        InvalidRequestError: There is no such backend, or the name is invalid.
        NotSupportedError: NCCL is not available here.
    """

    def __init__(self, client: SessionClient, name: str, *, backend: str, device: Any, interface: str | None) -> None:
        self.name = check_store_name(name)
        self._backend = check_backend(backend)
        self.device: torch.device | None = None
        if BACKENDS[backend].needs_device:
            check_available()
            self.device = resolve_device(device or "cuda")
        self._client = client
        self._interface = interface

    def join(
        self, *, world_size: int | None, rank: int | None, last: GroupEpoch | None, deadline: Deadline
    ) -> GroupEpoch:
        """Joins the next epoch and connects it. If it ends before it is connected, joins the next one at once.

        Whatever fails, this is no member of an epoch that was formed meanwhile: the others would wait for it.

        Raises:
            DeadlineExceededError: The others did not join in time.
            InvalidRequestError: Others have requested something else.
            NotSupportedError: Two members of an nccl group share a GPU.
            ConnectError: The members cannot reach one another.
        """
        formed: GroupEpoch | None = None
        while True:
            try:
                formed = self._ask(world_size, rank, formed or last, deadline)
                if self._open(formed, deadline):
                    return formed
            except BaseException:
                if formed is not None:
                    formed.leave()
                raise

    def _open(self, epoch: GroupEpoch, deadline: Deadline) -> bool:
        """Connects an epoch; returns False if it has ended before, and there is time for the next one."""
        try:
            epoch.open(deadline, self._client.pool)
        except TDServeError:
            if not epoch.is_lost or deadline.expired:
                raise
            epoch.retire()
            return False
        return True

    def _ask(self, world_size: int | None, rank: int | None, last: GroupEpoch | None, deadline: Deadline) -> GroupEpoch:
        request = control_pb2.JoinGroup(
            name=self.name,
            world_size=world_size or 0,
            rank=rank,
            backend=self._backend,
            device=self._find_device_uuid(),
        )
        if last is not None:
            request.epoch, request.last_rank, request.last_world_size = last.number, last.rank, len(last.members)

        def attempt(session: Session, number: int, deadline: Deadline) -> GroupEpoch:
            request.timeout_s = deadline.remaining_s or 0.0
            pending = session.send(number, join_group=request)
            answer = pending.wait(compute_answer_timeout_s(deadline), f"the next epoch of group {self.name!r}")
            formed = answer.group_formed
            try:
                hosts = {member.host for member in formed.members}
                host = self._interface or find_offered_address(hosts, session.find_interface())
                return GroupEpoch(session, self.name, formed, host=host, device=self.device)
            except BaseException:
                notice = control_pb2.GroupNotice(name=self.name, epoch=formed.epoch, leave=True, is_busy=True)
                session.notify(control_pb2.ClientMessage(group_notice=notice))
                raise

        return self._client.call(attempt, deadline)

    def _find_device_uuid(self) -> str:
        return "" if self.device is None else str(torch.cuda.get_device_properties(self.device).uuid)
