"""The parts of the control process that all movers share."""

from __future__ import annotations

from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.server.movers.value_writes import ValueWrites
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.tensordicts.writes import Writes
from tdserve.server.weights.version_sender import VersionSender


class MoverContext:
    """The parts of the control process that movers use.

    Args:
        stores: All stores of the server.
        values_worker: The one worker that writes non-tensor values.
        writes: Replaces existing content.
        versions: Sends versions of weights.
        traffic: Counts transfers.
        held: Counts the memory of requests.
    """

    def __init__(
        self,
        stores: Stores,
        values_worker: DataWorker,
        writes: Writes,
        versions: VersionSender,
        traffic: Traffic,
        held: AdmissionBudget,
    ) -> None:
        self.stores = stores
        self.values = ValueWrites(values_worker)
        self.writes = writes
        self.versions = versions
        self.traffic = traffic
        self.held = held
