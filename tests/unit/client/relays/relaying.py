"""Two clients that pass versions on, and the control process between them: it passes entries on and keeps reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

import torch
from tensordict import TensorDict

from tdserve.client.relays.kept_version import KeptVersion
from tdserve.client.relays.relay import SessionRelays
from tdserve.messages.content import ReadStatus, make_status_column, read_layout
from tdserve.structure.captures.capture import capture
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2
from tests.gloo_secret import SECRET

TD = TensorDict({"b": torch.arange(700_000), "a": torch.tensor([1.5])}, [])
SPEC = capture(TD).spec
LAYOUT = read_layout(SPEC, is_packed=True)
POOL = BufferPool()


def content() -> torch.Tensor:
    """Returns the content of a version as it travels, with its status at the end."""
    flat = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    columns = [TD[slot.path] for slot in LAYOUT.slots[: LAYOUT.num_leaves]]
    columns.append(torch.from_numpy(make_status_column(ReadStatus.WHOLE)))
    for slot, column in zip(LAYOUT.slots, columns, strict=True):
        flat[slot.offset : slot.offset + slot.nbytes] = column.view(torch.uint8)
    return flat


class Office:
    """The part of the control process that two clients need."""

    def __init__(self) -> None:
        self.ends = [self._client(0), self._client(1)]
        self.reports: list[list[control_pb2.RelayReport]] = [[], []]
        self._changed = Condition()

    def _client(self, number: int) -> SessionRelays:
        def send(message: control_pb2.ClientMessage) -> None:
            if message.HasField("rendezvous"):
                self.ends[1 - number].feed(message.rendezvous)
                return
            with self._changed:
                self.reports[number].append(message.relay_report)
                self._changed.notify_all()

        return SessionRelays(send, lambda: "127.0.0.1")

    def wait_report(self, client: int, kind: str) -> control_pb2.RelayReport:
        """Waits for the first report of this kind by a client, and returns it."""

        def found() -> control_pb2.RelayReport | None:
            return next((each for each in self.reports[client] if each.WhichOneof("report") == kind), None)

        with self._changed:
            report = self._changed.wait_for(found, 20.0)
        assert report is not None, f"no report of {kind}"
        return report

    def introduce(self, hop: int, kept: int, *, client: int = 0) -> None:
        """Makes a client, by default the first one, pass on what came over ``kept``."""
        order = control_pb2.RelayOrder(pass_on=control_pb2.PassOn(hop=hop, kept=kept, secret=SECRET))
        self.ends[client].on_order(order)

    def keep(self, hop: int, buffer: torch.Tensor | None = None) -> KeptVersion:
        """Gives the first client a whole version."""
        kept = self.ends[0].keep(hop, LAYOUT, POOL)
        kept.buffer.copy_(content() if buffer is None else buffer)
        kept.add_arrived(len(LAYOUT.messages))
        return kept


@contextmanager
def office() -> Iterator[Office]:
    """Two clients, closed at the end."""
    opened = Office()
    try:
        yield opened
    finally:
        for client in opened.ends:
            client.close()
