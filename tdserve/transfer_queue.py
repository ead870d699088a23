"""The storage backend ``tdserve`` of TransferQueue: samples as entries of a keyed store. Needs ``TransferQueue``.

Importing this module registers the backend in this process: the storage manager, the storage client and the bootstrap
provider. Processes that attach to a running TransferQueue import it by themselves, since its configuration has an
object of this module. TransferQueue is read at version 0.1.11.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage import StorageKeyNotFoundError
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from tdserve.base.config import TransportName, has_address_variable, read_token
from tdserve.base.errors import (
    CorruptDataError,
    InvalidRequestError,
    KeyNotFoundError,
    TDServeError,
    TooLargeError,
    VersionConflictError,
)
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.launcher import Server
from tdserve.rules.kv.entry_changes import MAX_KEY_BYTES

BACKEND = "tdserve"
"""Name of the backend, and of its section in the configuration."""

STARTED_STORE = "transfer-queue"
"""Prefix of the names of stores that one run of TransferQueue makes for itself."""

MAX_CALL_KEYS = 8192
MAX_CALL_BYTES = 64 * 1024 * 1024
"""Entries and bytes of one put; a keyed store takes twice as many keys, and three times as many bytes."""

MAX_SAVED_KEYS = 1024
"""Entries of one file of a checkpoint, which are in memory while it is written."""

CHECKPOINT_FOLDER = "tdserve"
"""Where a checkpoint of TransferQueue has the entries."""

FIELDS_KEY = "fields"
"""The entry that lists all field names: a sample is cleared with all its fields, whichever its metadata names. No name
ever leaves it, since each process remembers which are there."""

MAX_FIELD_BYTES = MAX_KEY_BYTES - 1 - len(str(2**63))
"""Longest name of a field in UTF-8: with any number of a sample before it, it is a key of a keyed store."""

_GONE = object()


def register() -> None:
    """Does nothing more than the import of this module, which has registered the backend: a name for Ray's hooks."""


class StorePlace:
    """The store of a run, in the configuration that TransferQueue hands to each process.

    A process that unpickles it imports this module, and so has the backend registered before it asks for it.

    Attributes:
        address: Address of the server; None: ``TDSERVE_ADDRESS`` in each process.
        store: Name of the keyed store.
    """

    def __init__(self, address: str | None, store: str) -> None:
        self.address = address
        self.store = store

    def __repr__(self) -> str:
        return f"<StorePlace {self.store!r} at {self.address or 'TDSERVE_ADDRESS'}>"


@dataclass(frozen=True)
class BackendSettings:
    """The section ``backend.tdserve`` of TransferQueue's configuration.

    Attributes:
        address: Address of the server. None: the environment variable ``TDSERVE_ADDRESS``; if that is not set, the
            process that calls ``transfer_queue.init`` starts a server of its own.
        store: Name of a keyed store, which is created unless it exists, and which stays. None: one for this run.
        max_bytes, ttl_s: As in ``Client.create_kv``.
        transport, timeout_s: As in ``tdserve.connect``.
        token_file: File with the token of the server, in each process.
        allow_pickle: Whether values of any type are stored, as TransferQueue's own backends do.
        server: Arguments of ``tdserve.Server`` for the server that is started, such as ``root`` and ``host``.
        place: Is set when TransferQueue starts.
    """

    address: str | None = None
    store: str | None = None
    max_bytes: int | None = None
    ttl_s: float | None = None
    transport: TransportName = "auto"
    timeout_s: float = 30.0
    token_file: str | None = None
    allow_pickle: bool = True
    server: Mapping[str, Any] | None = None
    place: StorePlace | None = None

    @classmethod
    def parse(cls, section: Mapping[str, Any] | None) -> BackendSettings:
        """Returns the settings of a section. Raises InvalidRequestError for an unknown one."""
        found = dict(section or {})
        known = [each.name for each in fields(cls)]
        unknown = sorted(found.keys() - {*known, "client_name"})
        if unknown:
            raise InvalidRequestError(argument=f"backend.{BACKEND}.{unknown[0]}", reason=f"known are {known}")
        return cls(**{name: found[name] for name in known if name in found})

    def connect(self, address: str | None) -> Client:
        """Connects to a server; None: that of the environment."""
        token = None if self.token_file is None else read_token(self.token_file, "token_file")
        return connect(
            address,
            transport=self.transport,
            token=token,
            timeout_s=self.timeout_s,
            allow_pickle=self.allow_pickle,
        )


class StorageRun:
    """What ``transfer_queue.init`` has made: a server or a store. Its end, at the latest that of the process, ends it.

    Args:
        client: A client of the server, which is closed.
        store: Name of a store to delete; None: none.
        server: To be ended; None: none.
        folder: To be removed; None: none.
    """

    def __init__(self, client: Client, store: str | None, server: Server | None, folder: str | None) -> None:
        self._finalizer = weakref.finalize(self, _end_run, os.getpid(), client, store, server, folder)

    def end(self) -> None:
        """Ends what was made. Idempotent."""
        self._finalizer()


def _end_run(pid: int, client: Client, store: str | None, server: Server | None, folder: str | None) -> None:
    if os.getpid() != pid:  # the parent of a forked child still uses all of it
        return
    if store is not None and server is None:
        with suppress(TDServeError):  # the server is gone, or the store was deleted
            client.delete(store)
    client.close()
    if server is not None:
        server.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@StorageBootstrapProvider.register_provider(BACKEND)  # type: ignore[untyped-decorator]
def prepare_storage(conf: Any) -> StorageRun:
    """Makes the store of a run, and the server if there is none, and notes its place in the configuration.

    TransferQueue calls it in the first process that calls ``transfer_queue.init``.
    """
    settings = BackendSettings.parse(conf.backend.get(BACKEND))
    server, folder, address = None, None, settings.address
    if address is None and not has_address_variable():
        options = dict(settings.server or {})
        if "root" not in options:
            folder = options["root"] = tempfile.mkdtemp(prefix="tdserve-transfer-queue-")
        server = Server(**options).start()
        address = server.address
    name = settings.store or f"{STARTED_STORE}-{uuid4().hex[:8]}"
    client = settings.connect(address)
    run = StorageRun(client, None if settings.store else name, server, folder)
    client.create_kv(name, max_bytes=settings.max_bytes, ttl_s=settings.ttl_s, exists_ok=settings.store is not None)
    with open_dict(conf):
        if conf.backend.get(BACKEND) is None:
            conf.backend[BACKEND] = {}
        conf.backend[BACKEND].place = StorePlace(address, name)
    return run


@StorageClientFactory.register(BACKEND)
class TDServeStorageClient(StorageKVClient):
    """Values of TransferQueue by key, in a keyed store. Threads: safe.

    Args:
        config: The section ``backend.tdserve``; with ``address`` and ``store`` it needs no bootstrap.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        settings = BackendSettings.parse(config)
        place = settings.place or StorePlace(settings.address, settings.store or STARTED_STORE)
        self._client = settings.connect(place.address)
        self._store = self._client.kv(place.store)
        self._allow_pickle = settings.allow_pickle
        self._expires = self._store.settings.ttl_s > 0
        self._fields: set[str] = set()

    def put(self, keys: list[str], values: list[Any]) -> None:
        """Stores values, by several calls if there are many, or more than a server takes at once.

        Raises:
            InvalidRequestError: The name of a field is longer than 480 bytes. Nothing was stored.
            TooLargeError: A value has more than 192 MiB. Nothing of its call was stored.
        """
        self._note_fields(keys)
        self._put(keys, values)

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """Returns values in the order of their keys. Raises StorageKeyNotFoundError if one is missing."""
        found: list[Any] = []
        try:
            for start in range(0, len(keys), MAX_CALL_KEYS):
                found += self._get_part(keys[start : start + MAX_CALL_KEYS])
        except KeyNotFoundError as error:
            raise StorageKeyNotFoundError(str(error)) from error
        return found

    def _get_part(self, keys: list[str], **options: Any) -> list[Any]:
        """Returns values by several calls if together they are larger than what a server reads at once."""
        try:
            return list(self._store.get(keys, **options))
        except TooLargeError:
            if len(keys) < 2:
                raise
        half = len(keys) // 2
        return self._get_part(keys[:half], **options) + self._get_part(keys[half:], **options)

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Deletes values; those that are missing are gone already."""
        for start in range(0, len(keys), MAX_CALL_KEYS):
            self._store.delete(keys[start : start + MAX_CALL_KEYS], missing_ok=True)

    def list_fields(self) -> list[str]:
        """Returns the names of all fields that any process has stored."""
        return self._read_fields()[0]

    def save(self, folder: Path) -> None:
        """Writes to files in a new folder the entries that are there when it begins, except those cleared meanwhile.
        Each is as of the moment when it is read."""
        folder.mkdir()
        parts = [*self._list_parts()]
        for number, keys in enumerate(parts):
            found = zip(keys, self._get_part(keys, default=_GONE), strict=True)
            kept = {key: value for key, value in found if value is not _GONE}
            content = {"keys": [*kept], "values": [*kept.values()], "num_parts": len(parts)}
            torch.save(content, folder / f"part-{number:06d}.pt")

    def load(self, folder: Path) -> None:
        """Replaces all entries by those of a folder, which this process reads.

        Raises:
            InvalidRequestError: There is no such folder. Nothing was changed.
            CorruptDataError: A file is missing or damaged. Nothing was changed.
        """
        if not folder.is_dir():
            raise InvalidRequestError(argument="checkpoint_dir", reason=f"there is no {folder}")
        kept = {FIELDS_KEY, *(key for found in self._read_parts(folder) for key in found["keys"])}  # all can be read
        for keys in self._list_parts():
            self._store.delete([key for key in keys if key not in kept], missing_ok=True)
        for found in self._read_parts(folder):
            values = dict(zip(found["keys"], found["values"], strict=True))
            values.pop(FIELDS_KEY, None)
            self.put([*values], [*values.values()])

    def _read_parts(self, folder: Path) -> Iterator[dict[str, Any]]:
        files = sorted(folder.glob("part-*.pt"))
        for file in files:
            try:
                found = torch.load(file, weights_only=not self._allow_pickle)
                is_whole = found["num_parts"] == len(files) and len(found["keys"]) == len(found["values"])
            except Exception as fault:  # of whatever kind: it unpickles
                raise CorruptDataError(path=str(file), expected="entries of a checkpoint", actual=str(fault)) from fault
            if not is_whole:
                expected = f"{found['num_parts']} files of a checkpoint"
                raise CorruptDataError(path=str(folder), expected=expected, actual=f"{len(files)}, or other ones")
            yield found

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._client.close()

    def _list_parts(self) -> Iterator[list[str]]:
        keys = self._store.keys()
        for start in range(0, len(keys), MAX_SAVED_KEYS):
            yield keys[start : start + MAX_SAVED_KEYS]

    def _put(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for some, contents in _split(keys, values):
            self._put_part(some, contents)

    def _put_part(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Stores values by several calls if together they are larger than what a server takes at once."""
        try:
            self._store.put(keys, values)
            return
        except TooLargeError:
            if len(keys) < 2:
                raise
        half = len(keys) // 2
        self._put_part(keys[:half], values[:half])
        self._put_part(keys[half:], values[half:])

    def _read_fields(self) -> tuple[list[str], int]:
        try:
            found, version = self._store.get_with_versions(FIELDS_KEY)
        except KeyNotFoundError:
            return [], 0
        return found, version

    def _note_fields(self, keys: Sequence[str]) -> None:
        """Adds the fields of keys to the list of all, before anything is stored below them. Where entries expire, the
        list is put again with each sample: it must not expire first."""
        names = {key.partition("@")[2] for key in keys}
        for name in names:
            if len(name.encode()) > MAX_FIELD_BYTES:
                reason = f"the name of the field {name[:40]!r}... has more than {MAX_FIELD_BYTES} bytes"
                raise InvalidRequestError(argument="keys", reason=reason)
        while self._expires or names - self._fields:
            found, version = self._read_fields()
            self._fields |= set(found)
            if not self._expires and names <= self._fields:
                break
            with suppress(VersionConflictError):  # another process has added some
                self._store.put(FIELDS_KEY, sorted({*found, *names}), if_version=version)
                self._fields |= names
                break


@StorageManagerFactory.register(BACKEND)
class TDServeBackend(KVStorageManager):
    """TransferQueue's access to a keyed store, in each of its clients.

    Args:
        controller_info, zmq_context: As in ``KVStorageManager``.
        config: The section ``backend.tdserve``.
    """

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": BACKEND}, zmq_context=zmq_context)

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Stores samples. Raises InvalidRequestError for a field that is one text: its letters would be the values."""
        for name in data.keys():  # noqa: SIM118 (a tensordict iterates over rows)
            if isinstance(data[name], (str, bytes)):
                reason = "it is one text for all samples; give one for each, as a NonTensorStack"
                raise InvalidRequestError(argument=f"field {name!r}", reason=reason)
        await super().put_data(data, metadata, data_parser)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Returns the samples; meanwhile the event loop continues."""
        if not metadata.field_names:
            return TensorDict({}, batch_size=len(metadata))
        keys = self._generate_keys(metadata.field_names, metadata.global_indexes)
        values = await self._run(self.storage_client.get, keys)
        return self._merge_tensors_to_tensordict(metadata, values)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Clears samples with all their fields, also those that the metadata does not name."""
        names = await self._run(self.storage_client.list_fields)
        await self._run(self.storage_client.clear, self._generate_keys(names, metadata.global_indexes))

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes all samples to files below a folder of this process."""
        await self._run(self.storage_client.save, Path(checkpoint_dir) / CHECKPOINT_FOLDER)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replaces all samples by those of a checkpoint. Raises InvalidRequestError if another backend has made it."""
        await self._run(self.storage_client.load, Path(checkpoint_dir) / CHECKPOINT_FOLDER)

    def close(self) -> None:
        """Closes the connections."""
        client = getattr(self, "storage_client", None)  # a constructor that fails closes too
        if client is not None:
            client.close()
        super().close()

    @staticmethod
    async def _run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments))


def _split(keys: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
    """Splits a put into calls of bounded size."""
    sizes = [*map(_estimate_nbytes, values)]
    if sum(sizes) <= MAX_CALL_BYTES and len(keys) <= MAX_CALL_KEYS:
        yield keys, values
        return
    begin = nbytes = 0
    for end, size in enumerate(sizes):
        if end > begin and (nbytes + size > MAX_CALL_BYTES or end - begin == MAX_CALL_KEYS):
            yield keys[begin:end], values[begin:end]
            begin, nbytes = end, 0
        nbytes += size
    yield keys[begin:], values[begin:]


def _estimate_nbytes(value: Any) -> int:
    """Returns about how many bytes a value takes; 0 for lists and objects, whose size shows once they are encoded."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    return len(value) if isinstance(value, (str, bytes)) else 0
