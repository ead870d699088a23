"""Reads the files of a store in passes: in each only what may have changed since the one before.

``server/README.md`` has reading orders of checkpoints and moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tdserve.messages.changed_blocks import MAX_BLOCK_BYTES, count_blocks, iter_changed
from tdserve.store.roots.moved_files import Digest, compute_zero_digest
from tdserve.v1 import control_pb2

BLOCKS_PER_REQUEST = 32
"""Digests of this many blocks take the source some 30 ms."""

Read = Callable[[control_pb2.FileBlocks], control_pb2.FileBlocks]
"""Asks for blocks; returns the first of them."""


class FoundBlock(NamedTuple):
    """A block that was read.

    Attributes:
        path, offset, nbytes: Where it is.
        digest: Digest of its content.
        content: None if it is that of the last pass, or of a first one zero.
    """

    path: bytes
    offset: int
    nbytes: int
    digest: Digest
    content: bytes | None


@dataclass
class FilePasses:
    """What is known of the files of one store.

    Attributes:
        digests: Digests of each block, by path and offset, as of the last pass.
    """

    digests: dict[tuple[bytes, int], Digest] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        """Whether blocks are known, so that others must still have them."""
        return bool(self.digests)

    def read(self, files: control_pb2.FileSizes, read: Read) -> Iterator[list[FoundBlock]]:
        """Reads all blocks that may have changed, some at a time; what the iterator has yielded is known.

        A block that was never read counts as one of zeros: what has just been made of its size has them.
        """
        known, self.digests = self.digests, {}
        wanted = list(self._iter_changed(files, known))
        for first in range(0, len(wanted), BLOCKS_PER_REQUEST):
            asked = wanted[first : first + BLOCKS_PER_REQUEST]
            while asked:
                answer = read(control_pb2.FileBlocks(blocks=asked)).blocks
                blocks = [
                    FoundBlock(
                        block.path,
                        block.offset,
                        block.nbytes,
                        found.digest,
                        found.content if found.HasField("content") else None,
                    )
                    for block, found in zip(asked, answer, strict=False)
                ]
                self.digests.update(((block.path, block.offset), block.digest) for block in blocks)
                yield blocks
                asked = asked[len(answer) :]

    def _iter_changed(
        self, files: control_pb2.FileSizes, known: dict[tuple[bytes, int], Digest]
    ) -> Iterator[control_pb2.FileBlock]:
        """Yields the blocks that may have changed, and keeps the digests of the others."""
        for file in iter_changed(files):
            may_have_changed = set(file.numbers.tolist())
            for number in range(count_blocks(file.nbytes)):
                offset, size = number * MAX_BLOCK_BYTES, file.compute_size(number)
                before = known.get((file.path, offset))
                if before is not None and number not in may_have_changed:
                    self.digests[file.path, offset] = before
                    continue
                known_digest = before or compute_zero_digest(size)
                yield control_pb2.FileBlock(path=file.path, offset=offset, nbytes=size, digest=known_digest)


def make_block(block: FoundBlock) -> control_pb2.FileBlock:
    """Returns the message that writes a block."""
    return control_pb2.FileBlock(path=block.path, offset=block.offset, content=block.content)
