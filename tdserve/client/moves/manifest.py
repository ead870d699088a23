"""What a checkpoint consists of, and where its parts lie: a manifest for each checkpoint, blocks that several share.

A place has ``checkpoints/<id>.json``, one manifest each, and ``blocks/<first two digits>/<digest>``: the content of
blocks by its BLAKE2b digest of 16 bytes. A manifest is written last, so a checkpoint is there as a whole or not at all.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import json
import logging
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES
from tdserve.store.roots.archive import Archive
from tdserve.store.roots.moved_files import compute_digest
from tdserve.v1 import control_pb2

FORMAT = 1

_MOMENT = "%Y%m%d-%H%M%S-%f"
_FOLDER = "checkpoints"
_BLOCKS = "blocks"
_SUFFIX = ".json"
_MANIFEST = re.compile(rf"{_FOLDER}/(\d{{8}}-\d{{6}}-\d{{6}}-[0-9a-f]{{8}}){re.escape(_SUFFIX)}")

_log = logging.getLogger("tdserve.checkpoints")

PresentBlocks = Mapping[str, int | None]
"""Sizes in bytes of the blocks that a place has, by their digests; None: the place does not tell."""


@dataclass(frozen=True)
class ArchivedFile:
    """A file of a store.

    Attributes:
        path: Below the store's folder, as hexadecimal digits.
        digests: Digests of its blocks, as hexadecimal digits.
    """

    path: str
    nbytes: int
    digests: list[str]

    def iter_blocks(self) -> Iterator[tuple[int, int, str]]:
        """Yields offset, size and digest of each block."""
        for number, digest in enumerate(self.digests):
            offset = number * MAX_BLOCK_BYTES
            yield offset, min(MAX_BLOCK_BYTES, self.nbytes - offset), digest


@dataclass(frozen=True)
class ArchivedStore:
    """A store of a checkpoint.

    Attributes:
        uid: Its incarnation.
        on_record: All that is on record of it (``MovedStore``), as hexadecimal digits.
    """

    name: str
    kind: str
    uid: str
    on_record: str = field(repr=False)
    files: list[ArchivedFile] = field(repr=False)

    @property
    def moved(self) -> control_pb2.MovedStore:
        """All that is on record of it."""
        return control_pb2.MovedStore.FromString(bytes.fromhex(self.on_record))

    @property
    def nbytes(self) -> int:
        """Size of its files."""
        return sum(file.nbytes for file in self.files)

    def iter_digests(self) -> Iterator[str]:
        """Yields the digests of its blocks."""
        return (digest for file in self.files for digest in file.digests)

    def iter_sizes(self) -> Iterator[tuple[str, int]]:
        """Yields digest and size of each of its blocks."""
        return ((digest, nbytes) for file in self.files for _, nbytes, digest in file.iter_blocks())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a server.

    Attributes:
        id: Names it; later ones come behind in alphabetical order.
        created_s: Seconds since the epoch at which the stores were as it has them.
        stores: They.
        left_out: Names of stores that it does not have: adopted and damaged ones.
        paused_s: For how long stores served no request.
        written_nbytes: Size of the blocks that no earlier checkpoint had.
        server_id: Id of the root of which it is; "": it is not on record.
        damage: Why it cannot be restored, in a list of checkpoints: its manifest cannot be read, and only its id and
            moment are known; or blocks of stores are missing or have another size, and the others can be restored by
            name.
    """

    id: str
    created_s: float
    stores: list[ArchivedStore] = field(repr=False)
    left_out: list[str] = field(default_factory=list)
    paused_s: float = 0.0
    written_nbytes: int = 0
    server_id: str = ""
    damage: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(store.nbytes for store in self.stores)

    def list_digests(self) -> set[str]:
        """Returns the digests of all blocks."""
        return {digest for store in self.stores for digest in store.iter_digests()}

    def list_lacking(self, present: PresentBlocks) -> set[str]:
        """Returns the digests of its blocks that a place does not have in their size."""
        sizes = dict(each for store in self.stores for each in store.iter_sizes())
        return {digest for digest, nbytes in sizes.items() if present.get(digest, -1) not in (nbytes, None)}

    def list_stores_of(self, digests: set[str]) -> list[str]:
        """Returns the names of the stores that have one of these blocks."""
        return [store.name for store in self.stores if not digests.isdisjoint(store.iter_digests())]


def make_id(created_s: float, uid: str) -> str:
    """Returns the id of a checkpoint of a moment."""
    moment = datetime.fromtimestamp(created_s, timezone.utc)
    return f"{moment:{_MOMENT}}-{uid[:8]}"


def _find_moment(checkpoint_id: str) -> float:
    """Returns the moment that an id names; 0 if ``make_id`` did not make it."""
    try:
        return datetime.strptime(checkpoint_id.rpartition("-")[0] + "Z", f"{_MOMENT}%z").timestamp()
    except ValueError:
        return 0.0


def get_uid(checkpoint_id: str) -> str:
    """Returns the part of an id that checkpoints of several servers share which were written at the same time."""
    return checkpoint_id.rpartition("-")[2]


def list_ids(archive: Archive) -> list[str]:
    """Returns the ids of all checkpoints, the oldest first. Files with other names than manifests' do not count."""
    return [found[1] for name in archive.list_sizes(_FOLDER) if (found := _MANIFEST.fullmatch(name))]


def save(archive: Archive, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint one of the place; all its blocks are there."""
    content = json.dumps({"format": FORMAT, "saved_s": time.time(), "checkpoint": asdict(checkpoint)}).encode()
    archive.write(make_manifest_name(checkpoint.id), content + b"\n%08x" % zlib.crc32(content))


def load(archive: Archive, checkpoint_id: str, *, removes_damaged: bool = False) -> Checkpoint:
    """Reads a checkpoint's manifest.

    Args:
        removes_damaged: Whether a damaged one is removed: its checkpoint cannot be restored, and keeps its blocks.

    Raises:
        CorruptDataError: There is none of this id, or it is damaged, or has another format.
    """
    name = make_manifest_name(checkpoint_id)
    content, _, checksum = archive.read(name).rpartition(b"\n")
    damage = "" if checksum == b"%08x" % zlib.crc32(content) else "a damaged one"
    try:
        document = json.loads(content) if not damage else {}
        if not damage and document["format"] != FORMAT:
            raise CorruptDataError(path=name, expected=f"format {FORMAT}", actual=f"format {document['format']}")
        if not damage and document["checkpoint"]["id"] == checkpoint_id:
            return _read_checkpoint(document["checkpoint"])
        damage = damage or f"that of {document['checkpoint']['id']}"
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise CorruptDataError(
            path=name, expected="a manifest", actual=f"{type(fault).__name__}: {fault}"[:200]
        ) from fault
    if removes_damaged:
        archive.remove(name)
    raise CorruptDataError(path=name, expected="the manifest of this checkpoint", actual=damage)


def _read_checkpoint(fields: dict[str, Any]) -> Checkpoint:
    """Returns the checkpoint of a document. Raises TypeError, ValueError or KeyError if it is invalid."""
    stores = [
        ArchivedStore(**{**store, "files": [_read_file(**file) for file in store["files"]]})
        for store in fields["stores"]
    ]
    for store in stores:
        bytes.fromhex(store.on_record)
        if not all(isinstance(each, str) for each in (store.name, store.kind, store.uid)):
            raise TypeError("name, kind and uid of a store are texts")
    return Checkpoint(**{**fields, "stores": stores, "created_s": float(fields["created_s"])})


def _read_file(path: str, nbytes: int, digests: list[str]) -> ArchivedFile:
    bytes.fromhex(path)
    if (
        not isinstance(nbytes, int)
        or not isinstance(digests, list)
        or not all(isinstance(each, str) for each in digests)
    ):
        raise TypeError("a file has a size and digests")
    return ArchivedFile(path, nbytes, digests)


def load_all(archive: Archive, ids: Iterable[str] | None = None) -> Iterator[Checkpoint]:
    """Reads the manifests of these checkpoints, of all by default, the oldest first. One that cannot be read hides no
    other, and comes with its damage."""
    for each in list_ids(archive) if ids is None else ids:
        try:
            yield load(archive, each)
        except CorruptDataError as error:
            yield Checkpoint(each, _find_moment(each), [], damage=str(error))


def list_with_damage(archive: Archive) -> list[Checkpoint]:
    """Reads all manifests, the oldest first; also a checkpoint of which blocks are missing, or have another size, comes
    with its damage. The content of blocks is not read."""
    found = [*load_all(archive)]
    present = list_blocks(archive) if any(each.stores for each in found) else {}
    listed = [_note_lacking(each, present) for each in found]
    if listed == found:
        return found
    still = {*list_ids(archive)}  # one that was removed since has lost its blocks with it
    return [each for each in listed if each.id in still]


def _note_lacking(made: Checkpoint, present: PresentBlocks) -> Checkpoint:
    lacking = made.list_lacking(present)
    if not lacking:
        return made
    number = f"{len(lacking)} of its blocks are" if len(lacking) > 1 else "one of its blocks is"
    states = {"of another size" if digest in present else "missing" for digest in lacking}
    state = " or ".join(sorted(states))
    return replace(made, damage=f"{number} {state}, of store {', '.join(map(repr, made.list_stores_of(lacking)))}")


def load_newest(archive: Archive, server_id: str = "") -> Checkpoint | None:
    """Reads the newest manifest that can be read, of a root if one is given; None if there is none."""
    readable = (made for made in load_all(archive, reversed(list_ids(archive))) if not made.damage)
    return next((made for made in readable if server_id in ("", made.server_id)), None)


def list_blocks(archive: Archive) -> PresentBlocks:
    """Returns the blocks that a place has."""
    return {
        digest: nbytes
        for name, nbytes in archive.list_sizes(_BLOCKS).items()
        if name == _make_block_name(digest := name.rpartition("/")[2])
    }


def write_block(archive: Archive, digest: str, content: bytes) -> None:
    """Writes the content of a block."""
    archive.write(_make_block_name(digest), content)


def read_block(archive: Archive, digest: str, *, removes_damaged: bool = False) -> bytes:
    """Reads the content of a block.

    Args:
        removes_damaged: Whether a block with another content is removed, so that the next checkpoint that needs it
            writes it again.

    Raises:
        CorruptDataError: It is missing or damaged, or cannot be read.
    """
    name = _make_block_name(digest)
    content = archive.read(name)
    if compute_digest(content).hex() != digest:
        if removes_damaged:
            archive.remove(name)
        raise CorruptDataError(path=name, expected=f"content of digest {digest}", actual="another one")
    return content


def remove_checkpoint(archive: Archive, checkpoint_id: str) -> None:
    """Removes a checkpoint. Blocks that only it had go with the next that ``keep_newest`` removes."""
    archive.remove(make_manifest_name(checkpoint_id))


def keep_newest(archive: Archive, num_kept: int, *, server_id: str = "") -> list[str]:
    """Removes all checkpoints but the newest whole ones and what is newer than the last of these, and the blocks that
    only they had; returns the ids of those removed.

    One that lacks blocks, or has them in another size, may not push out one that can be restored. No other process may
    write a checkpoint to the same place meanwhile. A manifest that cannot be read stays, and so do all blocks: which
    ones it needs is not known, and the log names it.

    Args:
        server_id: Id of a root. Manifests of other roots stay, and do not count: they may be all that is left of
            them. "": all count.
    """
    if num_kept < 1:
        raise InvalidRequestError(argument="keep", reason=f"at least 1 checkpoint must be kept, got {num_kept}")
    ids = list_ids(archive)
    if len(ids) <= num_kept:
        return []
    found = {each.id: each for each in load_all(archive, ids) if not each.damage}
    own = [each for each in found if not server_id or found[each].server_id in (server_id, "")]
    if len(own) <= num_kept:
        return []
    present = list_blocks(archive)
    whole = [each for each in own if not found[each].list_lacking(present)]
    removed = own[: own.index(whole[-num_kept])] if len(whole) >= num_kept else []
    for checkpoint_id in removed:
        remove_checkpoint(archive, checkpoint_id)
    damaged = [each for each in ids if each not in found]
    if removed and damaged:
        line = "no block is freed at %s: the manifests of %s cannot be read; tdserve check PLACE --repair removes them"
        _log.warning(line, archive.place, ", ".join(damaged))
    elif removed:
        needed = {digest for each in found.keys() - {*removed} for digest in found[each].list_digests()}
        for digest in present.keys() - needed:
            archive.remove(_make_block_name(digest))
    return removed


def make_manifest_name(checkpoint_id: str) -> str:
    """Returns the name of a manifest at its place. Raises InvalidRequestError if that is no id of a checkpoint."""
    if "/" in checkpoint_id or not checkpoint_id.strip("."):
        raise InvalidRequestError(argument="checkpoint", reason=f"{checkpoint_id!r} is no id of a checkpoint")
    return f"{_FOLDER}/{checkpoint_id}{_SUFFIX}"


def _make_block_name(digest: str) -> str:
    return f"{_BLOCKS}/{digest[:2]}/{digest}"
