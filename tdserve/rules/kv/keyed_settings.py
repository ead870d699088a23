"""The settings of a keyed store, as canonical JSON in its record."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.rules.settings_text import read_settings
from tdserve.structure.trees.nodes import Node
from tdserve.structure.trees.tree import Spec

Eviction = Literal["none", "lru"]

Like = Literal["any", "tensordict", "tensor"]
"""What an entry is: anything, or one tensordict or tensor of the store's structure."""

MAX_TTL_S = 10.0 * 365 * 24 * 3600
"""Ten years: milliseconds since the epoch then still fit into an integer."""

MIN_TTL_S = 0.001
"""Expiry is kept in milliseconds."""


@dataclass(frozen=True)
class KeyedSettings:
    """Settings of a keyed store.

    Attributes:
        like: What an entry is.
        max_bytes: Most bytes of all entries, with their keys; 0: no limit.
        eviction: ``"none"``: a put without room is refused; ``"lru"``: entries that were not used recently make room.
        ttl_s: Seconds after which an entry is gone; 0: never.
        num_shards: For a part of a store that several servers share: how many parts there are, on which depends which
            of them has a key. 0: it is no part.
    """

    like: Like = "any"
    max_bytes: int = 0
    eviction: Eviction = "none"
    ttl_s: float = 0.0
    num_shards: int = 0

    def __post_init__(self) -> None:
        if self.like not in get_args(Like):
            raise InvalidRequestError(argument="like", reason=f"{self.like!r} is not one of {list(get_args(Like))}")
        if self.eviction not in get_args(Eviction):
            reason = f"{self.eviction!r} is not one of {list(get_args(Eviction))}"
            raise InvalidRequestError(argument="eviction", reason=reason)
        check_integer("max_bytes", self.max_bytes, 0)
        check_integer("num_shards", self.num_shards, 0)
        is_number = isinstance(self.ttl_s, (int, float)) and not isinstance(self.ttl_s, bool)
        if not is_number or (self.ttl_s and not MIN_TTL_S <= self.ttl_s <= MAX_TTL_S):
            reason = f"{self.ttl_s!r} is not a number of seconds from {MIN_TTL_S} to {MAX_TTL_S}"
            raise InvalidRequestError(argument="ttl_s", reason=reason)
        if self.eviction == "lru" and not self.max_bytes:
            raise InvalidRequestError(argument="eviction", reason="'lru' needs max_bytes: nothing else makes room")

    @property
    def is_plain(self) -> bool:
        """Whether a put needs to know nothing about the entries that it replaces."""
        return not (self.max_bytes or self.ttl_s)

    def make_stored_spec(self, fingerprint: bytes) -> Spec:
        """Returns the structure of the files of a store: values, and no tensor. It is another one for other entries, as
        for keys that are divided otherwise among the parts of a shared store.

        Args:
            fingerprint: Fingerprint of the structure of an entry.
        """
        return _make_stored_spec(self.like, fingerprint, self.num_shards)

    def to_json(self) -> str:
        """Returns the canonical text; settings that have their default are left out."""
        usual = KeyedSettings.__dataclass_fields__
        values = {name: each for name, each in dataclasses.asdict(self).items() if each != usual[name].default}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KeyedSettings:
        """Returns settings from a peer or from disk.

        Raises:
            InvalidRequestError: The text is not such JSON, or a value is invalid.
        """
        return cls(**read_settings(text, {field.name for field in dataclasses.fields(cls)}))


@lru_cache(maxsize=1024)
def _make_stored_spec(like: Like, fingerprint: bytes, num_shards: int) -> Spec:
    entry = Node((), None, None, None, (), inner=())
    shared = f" {num_shards}" if num_shards else ""
    return Spec(Node((), None, None, None, ((f"{like} {fingerprint.hex()}{shared}", entry),)))
