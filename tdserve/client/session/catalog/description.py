"""The description of a store that a client gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tdserve.base.errors import StoreExistsError
from tdserve.client.session.catalog import structure_text
from tdserve.client.session.catalog.structure_leaves import describe_spec
from tdserve.messages.store_kinds import KIND_NAMES, QUEUE, make_kind_error
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2
from tdserve.values.value_codec import decode_value


@dataclass(frozen=True)
class VersionInfo:
    """One kept version of weights.

    Attributes:
        version: Its number.
        nbytes: Size of its tensors.
        created_s: When it became visible, seconds since the epoch.
        metadata: As given by the publisher.
    """

    version: int
    nbytes: int
    created_s: float
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """``created_s``."""
        return self.created_s

    @property
    def size(self) -> int:
        """``nbytes``."""
        return self.nbytes


@dataclass(frozen=True)
class StoreDescription:
    """A store at the time of the request.

    Attributes:
        name: Its name.
        kind: ``"tensordict"``, ``"replay"``, ``"weights"`` or ``"keyed"``.
        spec: Its structure: complete for a tensordict, of one row for a replay, of the newest version for weights, of
            one entry for a keyed store (empty if each has its own).
        batch_size: Batch size of the spec.
        num_rows: First batch dimension (1 without one); live rows of a replay; entries of a keyed store.
        capacity: Rows of a replay, 0 for the others.
        nbytes: Size of all tensors.
        version: Content version; for weights, the newest version.
        inserts: Rows ever written to a replay.
        samples: Rows ever sampled from it.
        reserved_rows: Rows that writers are filling at the moment.
        min_size: Rows that a replay must hold before it is sampled.
        created_s: Seconds since the epoch.
        extra: Tensors that plain tensordict does not show when it opens the store's folder; ``objects`` lists the rest.
        path: The store's folder below the server's root.
        uid: Identity of this incarnation of the name.
        versions: Kept versions of weights.
        settings: Sampler, remover and limiter of a replay, limits of a keyed store; canonical JSON.
        num_leased: Rows of a replay that are handed out and not acknowledged.
        num_incomplete: Rows of a replay that lack leaves: they wait for a late reward, for example.
        num_pinned: Rows of a replay that are kept for the ranks of data-parallel readers.
        backlog: Rows of a replay that each consumer of its ``consumers=`` has not acknowledged yet.
        is_closed: Whether a replay accepts no more rows; of a shared one whether no shard does, so False while one
            does not answer, which may be open.
        share_non_tensor: Whether the non-tensor leaves of a tensordict are shown live.
        max_object_bytes: Room for its non-tensor values and ragged tensors.
        durability: What an acknowledged write survives: ``"process"``: the end of any process; ``"disk"``: also a power
            failure.
        checksum: Whether readers compare its rows with the checksums of the last sync.
        policy: Name of the weights with which a replay's rows are made; "" for none. If there is one:
        newest_policy_version: The version from which lags are counted; 0 before the first.
        lag_min, lag_mean, lag_max: How many versions its rows are old; None while no row has a known version.
        num_discarded: Rows that left because they were too old: of a queue, or in groups that a sample would not take.
        fanout: For weights, the number of clients to which each client sends a version at once; 0: the server decides.
        adopted: The user's folder that contains its tensors; "" if they are in the store's own.
        read_only: Whether every write is refused.
        num_waiting: Calls of clients that are waiting for it: for rows, for room, for a version.
        structure: How often its structure has changed.
        num_damaged: Rows that the server knows to be damaged: reading them raises CorruptDataError until they are
            written again. A replay counts them as reserved.
        damaged_rows: Numbers of the first of them, at most 8.
    """

    name: str
    kind: str
    spec: Spec
    batch_size: tuple[int, ...]
    num_rows: int
    capacity: int
    nbytes: int
    version: int
    inserts: int
    samples: int
    reserved_rows: int
    min_size: int
    created_s: float
    extra: tuple[str, ...]
    path: str
    uid: str
    versions: tuple[VersionInfo, ...]
    settings: str = ""
    num_leased: int = 0
    num_incomplete: int = 0
    num_pinned: int = 0
    is_closed: bool = False
    share_non_tensor: bool = False
    max_object_bytes: int = 0
    durability: str = "process"
    checksum: bool = False
    policy: str = ""
    newest_policy_version: int = 0
    lag_min: int | None = None
    lag_mean: float | None = None
    lag_max: int | None = None
    num_discarded: int = 0
    fanout: int = 0
    adopted: str = ""
    read_only: bool = False
    num_waiting: int = 0
    structure: int = 0
    backlog: Mapping[str, int] = field(default_factory=dict)
    num_damaged: int = 0
    damaged_rows: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Same as ``num_rows``."""
        return self.num_rows

    @property
    def bytes(self) -> int:
        """Same as ``nbytes``."""
        return self.nbytes

    @property
    def is_queue(self) -> bool:
        """Whether its rows are taken, and not sampled."""
        return bool(self.settings and json.loads(self.settings).get("is_queue"))

    @property
    def shown_kind(self) -> str:
        """The kind that people see: a table whose rows are taken is a queue."""
        return QUEUE if self.is_queue else self.kind

    @property
    def objects(self) -> tuple[str, ...]:
        """Paths of what is in the store's folder ``objects``, which plain tensordict does not open.

        These are non-tensor values, ragged tensors, and nested parts whose rows differ.
        """
        is_rows = self.kind in ("tensordict", "replay")
        return tuple(".".join(path) for path, _ in self.spec.values) if is_rows else ()

    def __str__(self) -> str:
        return self.tree()

    def check_kind(self, wanted: str) -> StoreDescription:
        """Returns this description. Raises WrongStateError if it is of a store of another kind: a handle's store was
        deleted, and its name means this one now.

        Args:
            wanted: As in ``shown_kind``.
        """
        if self.shown_kind != wanted:
            raise make_kind_error(self.name, self.shown_kind, wanted=wanted)
        return self

    def tree(self) -> str:
        """Returns the structure as a tree with a line for each entry; of a replay that of one row."""
        rows = f"{self.num_rows} of {self.capacity} rows" if self.capacity else f"{self.num_rows} rows"
        what = "; structure of a row" if self.capacity else ""
        return structure_text.format_tree(
            f"{self.name} ({self.kind}, {rows}, {self.nbytes} bytes{what})", self.spec.root
        )

    def composite(self) -> Any:
        """Returns the structure as a ``torchrl.data.Composite``.

        Raises:
            NotSupportedError: torchrl is not installed; the error has the command that installs it.
        """
        return structure_text.make_composite(self.spec.root)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything that JSON can represent; the spec as in ``describe_spec``."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        found["batch_size"] = list(self.batch_size)
        found["extra"], found["damaged_rows"] = list(self.extra), list(self.damaged_rows)
        found["settings"] = json.loads(self.settings) if self.settings else {}
        found["versions"] = [
            {"version": each.version, "nbytes": each.nbytes, "created_s": each.created_s} for each in self.versions
        ]
        found["spec"] = describe_spec(self.spec)
        return found


def read_version_info(message: control_pb2.VersionInfo) -> VersionInfo:
    """Reads the server's message about one version."""
    metadata = decode_value(message.metadata) if message.metadata else {}
    return VersionInfo(message.version, message.nbytes, message.created_s, metadata)


def from_message(message: control_pb2.StoreDescription) -> StoreDescription:
    """Reads the server's message."""
    spec = codec.decode(message.spec)
    versions = tuple(read_version_info(version) for version in message.versions)
    lags = message.lags if message.HasField("lags") else None
    return StoreDescription(
        name=message.name,
        kind=KIND_NAMES.get(message.kind, "unknown"),
        spec=spec,
        batch_size=spec.batch_size,
        num_rows=message.num_rows,
        capacity=message.capacity,
        nbytes=message.nbytes,
        version=message.version,
        inserts=message.inserts,
        samples=message.samples,
        reserved_rows=message.reserved_rows,
        min_size=message.min_size,
        created_s=message.created_s,
        extra=tuple(message.extra),
        path=message.path,
        uid=message.uid,
        versions=versions,
        settings=message.settings,
        num_leased=message.num_leased,
        num_incomplete=message.num_incomplete,
        num_pinned=message.num_pinned,
        is_closed=message.is_closed,
        share_non_tensor=message.share_non_tensor,
        max_object_bytes=message.max_object_bytes,
        durability=message.durability,
        checksum=message.checksum,
        structure=message.structure,
        policy=json.loads(message.settings).get("policy", "") if message.settings else "",
        newest_policy_version=message.newest_policy_version,
        lag_min=lags.min if lags is not None else None,
        lag_mean=lags.mean if lags is not None else None,
        lag_max=lags.max if lags is not None else None,
        num_discarded=message.num_discarded,
        fanout=message.fanout,
        adopted=message.adopted,
        read_only=message.read_only,
        num_waiting=message.num_waiting,
        backlog=dict(message.backlog),
        num_damaged=message.num_damaged,
        damaged_rows=tuple(message.damaged_rows),
    )


def check_storage(found: StoreDescription, asked: control_pb2.CreateStoreRequest) -> None:
    """Raises StoreExistsError if an existing store has another durability, checksum or room than is asked."""
    for name in ("durability", "max_object_bytes", "checksum"):
        wanted, actual = getattr(asked, name), getattr(found, name)
        if wanted and wanted != actual:
            raise StoreExistsError(name=asked.name, reason=f"its {name} is {actual!r}, asked is {wanted!r}")
