"""Which checkpoint of a place can be restored in the place of one that cannot.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.client.moves.manifest import Checkpoint, get_uid, list_with_damage
from tdserve.store.roots.archive import Archive


@contextmanager
def name_another(chosen: Sequence[tuple[str, Archive]]) -> Iterator[None]:
    """A block that reads checkpoints, and whose errors name the newest that can be restored in their place.

    Args:
        chosen: Id and place of each checkpoint: of a cluster those of all servers.

    Raises:
        InvalidRequestError: One of them was removed since.
        CorruptDataError: A part of one is missing or damaged.
    """
    try:
        yield
    except CorruptDataError as error:
        if error.request_id:  # it is the server that has damaged data
            raise
        listed = [list_with_damage(archive) for _, archive in chosen]
        newest = _find_newest_whole(listed, without=str(error.fields["path"]).rpartition("/")[2])
        advice = (
            f"the newest one that is whole is {newest}: choose it by --checkpoint {newest} (checkpoint= in Python)"
            if newest
            else f"no other one{' of all servers' * (len(chosen) > 1)} is whole"
        )
        for (checkpoint_id, archive), found in zip(chosen, listed, strict=True):
            if checkpoint_id not in [each.id for each in found]:
                reason = f"{archive.place} no longer has {checkpoint_id}, which was removed while it was read; {advice}"
                raise InvalidRequestError(argument="checkpoint", reason=reason) from error
        raise error.with_fields(actual=f"{error.fields['actual']}; {advice}") from error


def _find_newest_whole(listed: list[list[Checkpoint]], *, without: str) -> str | None:
    """Returns the id of the newest checkpoint that is whole at all places.

    Args:
        listed: The checkpoints of each place, the oldest first.
        without: Digest of a block that no such checkpoint may need: its content is damaged.
    """
    whole = [
        {get_uid(each.id): each.id for each in found if not each.damage and without not in each.list_digests()}
        for found in listed
    ]
    return next((whole[0][uid] for uid in reversed(whole[0]) if all(uid in each for each in whole)), None)
