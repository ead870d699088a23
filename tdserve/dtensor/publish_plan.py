"""What a publish works out from the leaves of all ranks, and keeps while they stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.weights.lru_names import NewestNames
from tdserve.dtensor.shard_regions import Region
from tdserve.dtensor.sharded_index import IndexedLeaf, IndexedPiece, RankLeaf, assign_pieces, encode_leaves


class OwnPiece(NamedTuple):
    """A piece that this rank publishes: its leaf, its key in the part, and its box."""

    leaf: str
    key: str
    region: Region


class PublishPlan(NamedTuple):
    """What a rank publishes of which leaves.

    Attributes:
        identity: The publish that has made it; no other plan has it, but those of the other ranks of that publish.
        rank: This rank.
        size: Number of ranks.
        leaves: What this rank has. If all ranks have a plan of one identity, and what they have is still this, then
            each would make the same plan again.
        own: What this rank publishes.
        indexed: What the index has about the leaves, in the first rank; "" in others.
    """

    identity: str
    rank: int
    size: int
    leaves: Mapping[str, RankLeaf]
    own: Sequence[OwnPiece]
    indexed: str


def make_plan(ranks: Sequence[Mapping[str, RankLeaf]], rank: int, identity: str, *, store: str) -> PublishPlan:
    """Makes the plan of a rank from what each one has. Errors as in ``assign_pieces``."""
    pieces = assign_pieces(ranks, store=store)
    own = [
        OwnPiece(name, each.key, each.region) for name, owned in pieces.items() for each in owned if each.rank == rank
    ]
    found = {}
    for name, owned in pieces.items() if rank == 0 else ():
        leaf = next(each[name] for each in ranks if name in each)
        indexed = [IndexedPiece(piece.rank, (piece.key,), piece.region) for piece in owned]
        found[name] = IndexedLeaf(leaf.dtype, leaf.shape, indexed)
    return PublishPlan(identity, rank, len(ranks), ranks[rank], own, "" if rank else encode_leaves(found))


_plans: WeakKeyDictionary[Client | ClusterClient, NewestNames[PublishPlan]] = WeakKeyDictionary()
"""The last plan for each name of weights of a client. One that does not fit any more is made again."""


def find_plan(
    client: Client | ClusterClient, name: str, leaves: Mapping[str, RankLeaf], rank: int, size: int
) -> PublishPlan | None:
    """Returns the last plan, if this rank has the same leaves, and is the same of as many; None otherwise."""
    kept = _plans.get(client)
    plan = None if kept is None else kept.get(name)
    return plan if plan is not None and (plan.rank, plan.size, plan.leaves) == (rank, size, leaves) else None


def keep_plan(client: Client | ClusterClient, name: str, plan: PublishPlan) -> None:
    """Keeps a plan for the next publish."""
    _plans.setdefault(client, NewestNames()).put(name, plan)
