"""Versions of weights from their files: copied, or mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tdserve.base.errors import CorruptDataError, TransferAbortedError, WrongStateError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.session.session_client import SessionClient
from tdserve.client.weights.version_part import VersionPart
from tdserve.messages.content import write_layout
from tdserve.store.disk.held_folder import find_name
from tdserve.store.weights.version_mappings import make_leaf_views
from tdserve.store.weights.versions import VersionFile, list_leaf_places
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class RetiredVersionError(TransferAbortedError):
    """A version was retired before it was opened."""


class GoneVersionError(RetiredVersionError):
    """The file of a version, or that of its values, was not there.

    Args:
        path: Path of the file of the version.
        accepted: The server's answer that named it.
    """

    def __init__(self, path: Path, accepted: control_pb2.Accepted) -> None:
        super().__init__(transfer=0, reason=f"version {accepted.version} is gone")
        self._path = find_name(path)
        self._key = (accepted.uid, accepted.version)

    def check_new(self, gone: set[tuple[str, int]]) -> None:
        """Adds the version to those that were gone. Raises CorruptDataError if it is one of them: a server that names
        it again has not retired it, but has lost its files."""
        if self._key in gone:
            raise CorruptDataError(
                path=str(self._path), expected="the files of a version that is kept", actual="none"
            ) from self
        gone.add(self._key)


def map_version(
    client: SessionClient,
    path: Path,
    spec: Spec,
    part: VersionPart,
    accepted: control_pb2.Accepted,
    destination: Destination | None,
    *,
    copy: bool,
) -> Content:
    """Returns the content of a version that the server has named.

    Args:
        path: Its file.
        spec: Its structure.
        part: What the caller asked for: all or some leaves, with the same dtypes, or with others to which they are
            converted while they are copied.
        destination: The caller's ``out``; filled in any case.
        copy: False maps the file instead, which is not written again as long as any of the tensors exists.

    Raises:
        RetiredVersionError: Request the version again.
        SpecMismatchError: The destination does not fit; nothing was written to it.
    """
    wanted = part.wanted
    if destination is not None:
        destination.check(wanted)
    copy = copy or _is_converted(spec, wanted)
    try:
        file = VersionFile.map(path, spec) if destination is None and not copy else VersionFile.open(path, spec)
    except WrongStateError as error:
        raise RetiredVersionError(transfer=0, reason=str(error)) from error
    except CorruptDataError as error:
        if path.exists():
            raise
        raise GoneVersionError(path, accepted) from error
    with file:  # until all is copied: then it may be written again
        values = file.read_values() if wanted.values else b""
        if values is None:
            raise GoneVersionError(path, accepted)
        if destination is None and not copy:
            leaves = {path: file.leaves[path] for path, _ in wanted.tensors}
        elif wanted is spec:
            leaves = _copy_leaves(client, file, spec, destination)
        else:
            leaves = _convert_leaves(client, file, wanted, destination)
        found, decoded = part.decode_values(values, allow_pickle=client.allow_pickle)
        content = Content(found, leaves, decoded, accepted.version, accepted)
        client.observed_calls.count_content(bytes_out=wanted.nbytes)
        if destination is not None:
            is_direct = wanted is spec and destination.find_places(write_layout(spec, is_packed=True)) is not None
            destination.finish(content, was_direct=is_direct)
    return content


def _is_converted(spec: Spec, wanted: Spec) -> bool:
    if wanted is spec:  # thousands of leaves need not be compared
        return False
    stored = dict(spec.tensors)
    return any(stored[path] != leaf for path, leaf in wanted.tensors)


def _copy_leaves(
    client: SessionClient, file: VersionFile, spec: Spec, destination: Destination | None
) -> dict[tuple[str, ...], torch.Tensor]:
    layout = write_layout(spec, is_packed=True)
    places = None if destination is None else destination.find_places(layout)
    if destination is not None and places is None:
        return file.leaves  # copied later, by the code that has the caller's tensors
    content, slots = file.content, list_leaf_places(spec)
    if places is not None:
        targets, numbers = places.contents or (), layout.leaf_numbers
        for path, offset, nbytes in slots:
            targets[numbers[path]][:] = content[offset : offset + nbytes]
        return {slot.path: tensor for slot, tensor in zip(layout.slots, places.tensors, strict=True)}
    buffer = client.pool.take(spec.nbytes)
    np.copyto(buffer.numpy(), content)
    return make_leaf_views(buffer, spec)


def _convert_leaves(
    client: SessionClient, file: VersionFile, wanted: Spec, destination: Destination | None
) -> dict[tuple[str, ...], torch.Tensor]:
    if destination is not None:
        return file.leaves  # converted while they are copied later
    leaves = make_leaf_views(client.pool.take(wanted.nbytes), wanted)
    for path, leaf in leaves.items():
        leaf.copy_(file.leaves[path])
    return leaves
