"""Where the stores of several servers live: the owner of a name, and the record of a store that is not simply there.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from typing import Any, Literal, get_args

from tdserve.base.errors import InvalidRequestError
from tdserve.base.ids import check_store_name, check_text
from tdserve.base.integers import check_integer

OnShardLoss = Literal["redirect", "wait", "raise"]
"""What a writer does while its shard does not answer."""

Shards = int | Literal["all"]
"""On how many servers a store is."""

PlacementKind = Literal["replay", "queue", "keyed", "dataset", "moved", "directory"]
"""The kind of a store that several servers share; or ``moved``: one server has all of it, but not the one with the
record; or ``directory``: no store (see ``DIRECTORY``)."""

DIRECTORY = "#directory"
"""Name of the record at each server that owners know of all stores that are not with them, for this many servers."""

MAX_SERVERS = 4096

MAX_RECORD_BYTES = 1 << 16
"""See the settings of a table, which it contains."""

_SEPARATOR, _SPLITS = "#", "splits"


def order_servers(name: str, num_servers: int) -> list[int]:
    """Returns the numbers of all servers by rendezvous hashing of a name: the first is its owner, and the next ones
    would be if those before did not exist. More servers change the owner of few names.

    https://en.wikipedia.org/wiki/Rendezvous_hashing
    """

    def weigh(server: int) -> bytes:
        return blake2b(f"{server}/{name}".encode(), digest_size=16).digest()

    return sorted(range(num_servers), key=weigh, reverse=True)


def choose_owner(name: str, num_servers: int) -> int:
    """Returns the number of the server that decides about a name.

    Raises:
        InvalidRequestError: No store can have this name.
    """
    return order_servers(check_store_name(name), num_servers)[0]


def hash_to_shard(value: bytes, num_shards: int) -> int:
    """Returns the shard of a value; the same in every process and on every machine."""
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "big") % num_shards


def choose_servers(name: str, shards: Shards, num_servers: int) -> tuple[int, ...]:
    """Returns the servers of the shards of a store: those that rendezvous hashing of its name puts first.

    Raises:
        InvalidRequestError: No store can have this name, or ``shards`` is neither ``"all"`` nor a number of servers
            that there are.
    """
    check_no_part(check_store_name(name))
    number = num_servers if shards == "all" else check_integer("shards", shards, 1, maximum=num_servers)
    return tuple(order_servers(name, num_servers)[:number])


def choose_writer_shard(num_shards: int, *, writer: int, identity: bytes, rank: int | None) -> int:
    """Returns the shard that a writer keeps to.

    Args:
        writer: Number that the caller gives to the writer; 0: none.
        identity: Distinguishes writers without a number.
        rank: Rank of the process, which decides for writers without a number; None: it has none.
    """
    number = writer or rank
    return hash_to_shard(identity, num_shards) if number is None else number % num_shards


def list_shards_to_try(shard: int, num_shards: int, on_loss: OnShardLoss, *, salt: bytes = b"") -> list[int]:
    """Returns the shards that may take the rows of a writer, its own first; the order of the others depends on
    ``salt``, so that the writers of a lost shard go to different ones."""
    if on_loss != "redirect" or num_shards == 1:
        return [shard]
    num_others = num_shards - 1
    first = hash_to_shard(salt, num_others)
    return [shard, *((shard + 1 + (first + step) % num_others) % num_shards for step in range(num_others))]


def name_part(name: str, shard: int) -> str:
    """Returns the name under which a server has its part of a store."""
    return f"{name}{_SEPARATOR}{shard}"


def name_splits(name: str) -> str:
    """Returns the name of the keyed store that has how a table's draws for several ranks are divided."""
    return f"{name}{_SEPARATOR}{_SPLITS}"


def check_no_part(name: str) -> None:
    """Raises InvalidRequestError if a new store of this name would be taken for a part of another."""
    if name == DIRECTORY or find_whole(name) is not None:
        reason = f"{name!r} is a name of a part of a store that servers share: end it otherwise than by # and a number"
        raise InvalidRequestError(argument="name", reason=reason)


def find_whole(name: str) -> str | None:
    """Returns the store that a part belongs to, by the part's name; None for the name of any other store."""
    whole, separator, part = name.rpartition(_SEPARATOR)
    return whole if separator and whole and (part.isdecimal() or part == _SPLITS) else None


def check_one_shard(shards: Shards) -> None:
    """Raises InvalidRequestError if a store of one server is to have more shards."""
    if shards not in (1, "all"):
        raise InvalidRequestError(argument="shards", reason=f"{shards!r}: this client has one server")


@dataclass(frozen=True)
class PlacementRecord:
    """The record that the owner of a name has, in place of the store itself.

    Attributes:
        kind: What its parts are.
        servers: Numbers of the servers, by shard.
        settings: Settings of the whole table, or keyed store, as canonical JSON.
        capacity: Rows of all parts of a table or a dataset.
        on_shard_loss: What a writer does while its shard does not answer.
        shard_by: Key of the rows whose value chooses the shard; () if the writer chooses it.
        move: For a store that has moved: id of the move.
        owner: Number of the server that has the record, for the client that made it; None: not known.
        copy_at: Number of the server for which this copy of the record was made, one of those with a part; None: it is
            the record itself. Clients go by a copy while the owner does not answer.
        revision: How many times parts have moved; of several copies the latest counts.
    """

    kind: PlacementKind
    servers: tuple[int, ...]
    settings: str = ""
    capacity: int = 0
    on_shard_loss: OnShardLoss = "redirect"
    shard_by: tuple[str, ...] = ()
    move: str = ""
    owner: int | None = None
    copy_at: int | None = None
    revision: int = 0

    def __post_init__(self) -> None:
        for argument, choices in (("kind", PlacementKind), ("on_shard_loss", OnShardLoss)):
            value = getattr(self, argument)
            if value not in get_args(choices):
                raise InvalidRequestError(
                    argument=argument, reason=f"{value!r} is not one of {list(get_args(choices))}"
                )
        for server in self.servers:
            check_integer("servers", server, 0, maximum=MAX_SERVERS - 1)
        for argument, number in (("owner", self.owner), ("copy_at", self.copy_at)):
            if number is not None:
                check_integer(argument, number, 0, maximum=MAX_SERVERS - 1)
        if not self.servers or len(set(self.servers)) < len(self.servers):
            raise InvalidRequestError(argument="servers", reason=f"{self.servers!r} names none, or one twice")
        check_integer("capacity", self.capacity, 0)
        check_integer("revision", self.revision, 0)
        if self.is_forward != bool(self.move) or (self.is_forward and self.num_shards > 1):
            raise InvalidRequestError(argument="settings", reason=f"no move to one server: {self!r}")

    @classmethod
    def make_forward(cls, server: int, move: str) -> PlacementRecord:
        """Returns the record of a store that has moved to a server."""
        return cls("moved", (server,), move=move)

    @property
    def is_listed(self) -> bool:
        """Whether a server that has this record lists it among its stores."""
        return self.kind not in ("moved", "directory")

    @property
    def is_forward(self) -> bool:
        """Whether it is what a move leaves at the source, and at the owner of the name: it leads to the one server that
        has the whole store now."""
        return self.kind == "moved"

    def replace_server(self, shard: int, server: int) -> PlacementRecord:
        """Returns the record once a part is on another server. Raises InvalidRequestError if that has a part."""
        return replace(self, servers=(*self.servers[:shard], server, *self.servers[shard + 1 :]))

    def has_same_division(self, other: PlacementRecord) -> bool:
        """Returns whether another record divides rows or keys among parts as this one does."""
        division = ("kind", "num_shards", "capacity", "shard_by")
        return all(getattr(self, name) == getattr(other, name) for name in division)

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy of the owner's record."""
        return self.copy_at is not None

    def list_copies(self) -> dict[int, PlacementRecord]:
        """Returns the copies of this record that the servers of its parts have, by server."""
        return {server: replace(self, copy_at=server) for server in self.servers if server != self.owner}

    @property
    def num_shards(self) -> int:
        """Number of parts."""
        return len(self.servers)

    @property
    def part_capacity(self) -> int:
        """Rows of each part of a table."""
        return -(-self.capacity // self.num_shards)

    def to_json(self) -> str:
        """Returns the canonical text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PlacementRecord:
        """Reads a record from a peer or from disk.

        Raises:
            InvalidRequestError: The text is not such JSON, or a value is invalid.
        """
        check_text("settings", text, max_bytes=MAX_RECORD_BYTES)
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as fault:
            raise InvalidRequestError(argument="settings", reason=f"{text[:80]!r} is not JSON") from fault
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not {"kind", "servers"} <= values.keys() <= known:
            raise InvalidRequestError(argument="settings", reason=f"{text[:80]!r} is not a placement")
        values["servers"] = _read_tuple(values["servers"])
        values["shard_by"] = _read_tuple(values.get("shard_by", []))
        return cls(**values)


def _read_tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidRequestError(argument="settings", reason=f"{value!r} is not a list")
    return tuple(value)
