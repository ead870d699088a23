"""Content that this process writes into the server's files itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tdserve.base.errors import TDServeError
from tdserve.client.content.leaves import make_leaves
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_writes import put_rows, put_selection, put_version
from tdserve.client.session.channels.content_channel import ContentChannel
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import OnPermit
from tdserve.messages.content import write_layout
from tdserve.structure.captures.capture import Captured
from tdserve.structure.tensors.file_tensors import make_content_error
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2


class PlacedContent(Outgoing):
    """Content whose tensors this process writes where the server permits; its values go to the worker that stores them.

    Arguments and errors as in ``Outgoing``.

    Args:
        local: The session's local end.

    Raises:
        NotSupportedError: This process may only read.
    """

    def __init__(self, captured: Sequence[Captured], target: WriteTarget, local: LocalEnd) -> None:
        local.check_writable(f"writing to {target.store!r}")
        super().__init__(captured, target)
        self._local = local
        if target.is_packed:  # those of a version are written with its file
            return
        spooled = local.spool(self._values)
        if spooled is None:
            self.message.values = b"".join(self._values)
        else:
            self.message.spool_offset, self.message.spool_nbytes = spooled
            self.free = partial(local.free, spooled)
        self._values = []

    @property
    def on_permit(self) -> OnPermit:
        """Returns the call that writes into the server's files.

        Not cached: an object that holds its own method is only collected.
        """
        return self._put

    def post(self, content_channel: ContentChannel | None, tag: int, pool: BufferPool) -> list[Work]:
        """Prepares the copying of rows, while the server still decides where they go."""
        if self._target.is_extend:
            for each in self._captured:
                make_leaves(each, write_layout(each.spec))
        return []

    def _put(self, accepted: control_pb2.Accepted) -> control_pb2.Written:
        try:
            return self._write(accepted)
        except TDServeError:
            raise
        except Exception as fault:  # of the content: rows that it was to fill are given up, as is a version
            raise make_content_error(fault) from fault

    def _write(self, accepted: control_pb2.Accepted) -> control_pb2.Written:
        local, target = self._local, self._target
        if target.stored is None:
            put_version(local, accepted, self._captured[0], b"".join(self._values))
            return control_pb2.Written()
        store = local.store(target.store, accepted.uid, target.stored, structure=accepted.structure, path=accepted.path)
        if accepted.rows:
            return put_rows(store, accepted, self._captured, look=local.look)
        is_hidden = target.is_new or bool(accepted.path)
        put_selection(store, target.selection, self._captured[0], is_hidden=is_hidden)
        return control_pb2.Written()
