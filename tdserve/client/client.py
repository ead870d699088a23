"""The client of a server: stores of all kinds by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from tdserve.base.deadline import Deadline
from tdserve.base.errors import VersionNotFoundError, WrongStateError
from tdserve.base.ids import check_store_name
from tdserve.base.integers import check_integer
from tdserve.client.content.fake_modes import WEIGHTS, check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.groups.group import Group, join_group
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.kv.keyed_handle import KeyedHandle
from tdserve.client.kv.new_store import create_keyed
from tdserve.client.movers.mover_choice import make_movers
from tdserve.client.moves.checkpoint_restore import OnRestore, RestoreOptions
from tdserve.client.moves.checkpoint_writer import OnCheckpoint
from tdserve.client.moves.manifest import Checkpoint
from tdserve.client.moves.server_checkpoints import CHECKPOINT_TIMEOUT_S, Place, checkpoint_server, restore_server
from tdserve.client.session.by_address import OfProcess
from tdserve.client.session.catalog.catalog_client import ONCE, Once
from tdserve.client.session.catalog.description import StoreDescription, VersionInfo
from tdserve.client.session.requests.client_mover import ClientMovers
from tdserve.client.session.session import Session
from tdserve.client.session.store_changes import delete_store
from tdserve.client.session.store_options import StoreOptions
from tdserve.client.tables.new_table import create_table
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tables.row_like import make_row_like
from tdserve.client.tensordicts.reading import open_store
from tdserve.client.tensordicts.tensordict_client import TensorDictClient
from tdserve.client.weights.publication import Published, publish
from tdserve.client.weights.pulls import Pulls, Wanted, Weights, get_dtype_name, make_wanted, wait_newer
from tdserve.client.weights.subscription import Subscription
from tdserve.rules.catalog import Durability
from tdserve.rules.kv.keyed_settings import Eviction
from tdserve.rules.placement import OnShardLoss, Shards, check_one_shard
from tdserve.rules.replay.settings import Settings, make_queue_settings, make_replay_settings
from tdserve.structure.captures.declaring import Declared
from tdserve.structure.trees.tree import Path

AnyHandle = StoreHandle | ReplayHandle | QueueHandle | KeyedHandle
_Handle = TypeVar("_Handle", bound=AnyHandle)


@leave_modes_in_calls
class Client(TensorDictClient):
    """A connection to one server. Threads: safe. Pickled by address. In a forked child its own calls raise
    ForkedClientError, since its threads and sockets do not exist there; its handles continue with a client of the
    child's own.

    Use it as a context manager, or call ``close``. A client that is dropped is closed in another thread, with a
    ResourceWarning, once nothing that it handed out is left: handles, iterators, writers, subscriptions, groups, rows
    on lease, and calls under way keep it alive; its threads do not. A client of several servers, and any that is in a
    reference cycle, waits for Python's next garbage collection. What is alive at the end of the program ends there
    without a warning.

    It reconnects by itself: a call during a restart of the server continues when the server is back, or ends at its
    deadline. Every call takes ``timeout_s``: None is the client's default, 0 asks once without waiting.

    Args:
        address: ``host:port`` of the server.
        transport: How content moves. ``"auto"`` takes the best one available: ``"shm"`` on the server's machine,
            ``"nccl"`` if ``device`` is a GPU and the server has another, else ``"gloo"``. Any other is used as given,
            or the client raises.
        token: Bearer token, if the server requires one.
        timeout_s: Default for every call, seconds.
        allow_pickle: Whether non-tensor values of any type may be sent: those without a codec are pickled, and
            unpickled by readers with the same setting. Unpickling runs code that the writer chose, so set it only if
            all clients of the server are trusted. Other clients refuse to write such values, and get an error when they
            read one.
        device: The GPU that content is for, such as ``"cuda:0"``, if it may move from GPU to GPU by NCCL; results are
            still put there only by calls with ``device=``.
        numpy: True hands over all that is read as NumPy arrays, in dicts, nested where tensordicts were. They share the
            memory of what was received; bfloat16 and float8 become float32. Calls with ``numpy=`` or ``device=`` decide
            for themselves. Row numbers are arrays too. Handles of tensordict stores show what they read by index and
            key; their other methods are tensordict's own, of which ``numpy()`` returns arrays.

    A dict of NumPy arrays is accepted wherever a tensordict is, except as ``out``; nested dicts, tensors, numbers,
    strings and other values in it are fine. Its arrays are not copied first, unless they are read-only, have negative
    strides or another byte order. Where the structure is known, numbers of Python and lists get its dtypes, and the
    dimensions of the arrays tell one row from several; in ``like`` they declare float32 and int64. Elsewhere they are
    stored as the values that they are, and the batch size is ``[]``.

    What ``latest``, ``version`` and ``subscribe`` share:

    * ``out`` is a tensordict that is filled in place. If its leaves are contiguous CPU tensors they are received into
      directly. The extra state of modules is left out if it has none, such as ``TensorDict.from_module(module).data``;
      all else must be there. ``into`` is an ``nn.Module`` whose parameters and buffers are filled: they stay the same
      objects, with their ``requires_grad`` and their optimizer state. Names and shapes must be equal, and dtypes too,
      except that floating-point numbers are converted, as by ``load_state_dict``. ``data`` is then the module. Its
      modules that have ``get_extra_state`` and ``set_extra_state`` are then given the published state, whose tensors
      are on the CPU.
    * ``select`` is a key, or a list of keys, of leaves, or of nodes with all that is below them: only these are sent,
      all of them, and are in ``data``, at the places that they have in the version. ``out`` or ``into`` has just these.
      (Of non-tensor values all travel if one is selected.)
    * Without ``select``, leaves that have not changed since the last pulled version are not sent again (over the
      network, from a mebibyte on). They are taken from ``out`` or ``into``, or from the tensordict that was returned
      last if it still exists. Their checksums are compared, so it does not matter what was done to them in between.
    * ``dtype`` is a floating-point one, such as ``torch.bfloat16``: all floating-point leaves are converted to it
      before they are sent, and all of them are sent.
    * ``copy=False`` maps the version's file instead, over the transport ``shm``: nothing is copied, whatever the size,
      and all processes share the memory. Writes into these tensors stay in this process, so they are not locked, just
      like those of ``StoreHandle.map``. The file exists as long as any of them. With ``dtype``, or over another
      transport, it has no effect.
    * ``numpy`` is True for ``data`` as a dict of NumPy arrays, unless there is ``out`` or ``into``.
    """

    _pulls = OfProcess(lambda _: Pulls())
    _published = OfProcess(lambda _: Published())

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    # ------------------------------------------------------------ all stores

    def stores(self, prefix: str = "") -> list[str]:
        """Lists the names of all stores, sorted."""
        return self.catalog.stores(prefix)

    def __contains__(self, name: object) -> bool:
        return name in self.catalog

    def __iter__(self) -> Iterator[str]:
        return iter(self.stores())

    def __getitem__(self, name: str) -> Any:
        """Returns the handle of a store, by its kind: StoreHandle, ReplayHandle, QueueHandle or KeyedHandle.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        return self.open_handle(self.describe(name))

    def keys(
        self, name: str, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False
    ) -> list[str | Path]:
        """Lists the keys of a store as ``TensorDict.keys`` does: a nested key as a tuple.

        Raises:
            StoreNotFoundError: There is no such store.
        """
        return self.catalog.keys(name, include_nested, leaves_only, sort=sort)

    def describe(self, name: str, *, timeout_s: float | Once | None = ONCE) -> StoreDescription:
        """Returns the structure and the figures of a store.

        Args:
            timeout_s: Waits this long for a store that does not exist yet, or for a server that does not answer; 0 asks
                once, None is the client's default. By default waits only for the server, as every call does.

        Raises:
            StoreNotFoundError: There is no such store.
            StoreNotCreatedError: The store was not created in time. The error lists similar names. After one second the
                logger ``tdserve.client`` has logged them as a warning.
        """
        return self.catalog.describe(name, timeout_s=timeout_s)

    def delete(self, name: str) -> None:
        """Deletes a store and its files.

        Space that other clients on the server's machine have mapped is freed when they next open a store, or end.

        Raises:
            StoreNotFoundError: There is no such store.
            NotSupportedError: Several servers share it: a client of all of them can delete it.
        """
        delete_store(self, name)
        session = self._session  # read once: another thread may close the client meanwhile
        if session is not None:
            session.movers.reads.forget_deleted()

    def get_home(self, name: str) -> Client:
        """Returns the client of the server that has, or will have, a store: this one."""
        return self

    def open_handle(self, description: StoreDescription) -> AnyHandle:
        """Returns the handle of a store that was described."""
        opener = _OPENERS.get(description.kind)
        return open_store(self, description, "opening it") if opener is None else opener(self, description)

    def _open_as(self, handle_type: type[_Handle], what: str, call: str, found: StoreDescription) -> _Handle:
        handle = self.open_handle(found)
        if not isinstance(handle, handle_type):
            raise WrongStateError(state=f"store {found.name!r} is not a {what}", event=f"{call}()")
        return handle

    # ------------------------------------------------------------ replay stores

    @staticmethod
    def row_like(source: Any, policy: Any = None) -> Any:
        """Returns the row that an environment or collector of TorchRL is going to produce, for ``like=``.

        No step is made: the specs of an environment describe what it returns, and the policy is called with zeros.

        Args:
            source: An environment, a collector, or a spec such as ``Composite``. Of a batch of environments, and of a
                tensordict such as a rollout, the first row is taken.
            policy: Adds the keys that it writes. A collector's own by default.

        Raises:
            InvalidRequestError: The source is of another type.
        """
        return make_row_like(source, policy)

    def create_replay(
        self,
        name: str,
        like: Any,
        capacity: int,
        *,
        min_size: int = 1,
        sampler: Any = None,
        remover: Any = None,
        limiter: Any = None,
        max_times_sampled: int = 0,
        consumers: Sequence[str] | None = (),
        policy: str = "",
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        shards: Shards = 1,
        shard_by: Any = None,
        on_shard_loss: OnShardLoss = "redirect",
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> ReplayHandle:
        """Creates a replay store.

        Args:
            name: Name of the store.
            like: One row, such as ``rows[0]``; its content does not matter. Its batch dimensions, if it has some, are
                dimensions of each row. It must not have the keys that sampling adds (``index``, ``generation``,
                ``priority``, ...). Nested tensors in the first batch make its tensors ragged.
            capacity: Rows of the ring; space for all of them is reserved now.
            min_size: Rows needed before a sample is drawn; of a ``limiter`` that is given, its own ``min_size`` counts.
            sampler: ``tdserve.Uniform()`` (the default), ``Prioritized``, ``Fifo``, ``Lifo``, ``HighestPriority``,
                ``LowestPriority``, ``WithoutReplacement`` or ``Slices``.
            remover: Makes room when the table is full: ``tdserve.Fifo()`` (the default), ``Lifo``, ``LowestPriority``
                or ``HighestPriority``.
            limiter: Decides when calls wait: ``tdserve.MinSize(min_size)`` (the default), ``SampleToInsertRatio`` or
                ``Queue``.
            max_times_sampled: A row is deleted after it was sampled this often; 0: never.
            consumers: Names of consumers: a row is deleted once each of them has acknowledged it, and no other consumer
                may take rows. No row that one of them has not had is overwritten: the limiter is a ``Queue``, by
                default of ``capacity`` rows, and writers wait while it is full. The default sampler is ``Fifo()`` then.
                (): any consumer may come, and rows stay. Not with ``Slices`` or ``max_times_sampled``.
            policy: Name of the weights with which the rows are made; they need not be published yet. Each row gets a
                ``policy_version``, and ``sample(max_lag=)`` draws only rows of recent versions. When the weights' store
                is deleted, existing rows count as older than any lag.
            ragged: Keys of tensors whose size along their first dimension differs from row to row, or a dict of such
                keys with the dimensions of a row that differ, as ``{"image": (1, 2)}``. Or the key of a nested part
                whose rows differ in their first batch dimension, such as chat histories; ``()`` is the row itself.
                Nested tensors and lazy stacks in ``like`` are always ragged.
            max_object_bytes: Room for non-tensor values and ragged tensors, 1 GiB by default: address space. Its
                files grow as needed, and shrink only when the server starts.
            durability: ``"disk"``: a write is answered only when it is on the disk, and so survives a power failure.
                ``"process"``, the default: as soon as it survives the end of any process. What was written before the
                server's last sync survives a power failure in any case.
            checksum: True: readers compare each row with its checksum of the server's last sync, and raise
                DamagedRowError instead of returning damaged content. Rows written since the last sync, such as within
                the last 30 s, have none yet. It costs readers some 40 us for each leaf of 256 small rows, and half a
                second per GB, and as much for a write of some leaves of rows, or a change of the keys; writers of whole
                rows nothing.
            shards, shard_by, on_shard_loss: As in ``ClusterClient.create_replay``. One server has one shard, which is
                also ``"all"``, and the others have no effect.
            exists_ok: True returns an existing replay of the same structure and settings. One that came from a
                checkpoint takes the sampler and the limiter of the first such call, and is ordinary from then on.
            existsok: Tensordict's spelling of ``exists_ok``; either of them suffices.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, NotSupportedError, CapacityError: Nothing was
                created.
        """
        check_one_shard(shards)
        capacity = check_integer("capacity", capacity, 1)
        rules = {"sampler": sampler, "remover": remover, "limiter": limiter, "policy": policy, "consumers": consumers}
        settings = make_replay_settings(capacity, min_size=min_size, max_times_sampled=max_times_sampled, **rules)
        options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, checksum=checksum)
        description = create_table(self, name, like, capacity, settings, options, ragged)
        return ReplayHandle(self, description)

    def create_queue(
        self,
        name: str,
        like: Any,
        max_size: int,
        *,
        sampler: Any = None,
        policy: str = "",
        ragged: Declared = None,
        max_object_bytes: int | None = None,
        durability: Durability | None = None,
        checksum: bool = False,
        shards: Shards = 1,
        shard_by: Any = None,
        on_shard_loss: OnShardLoss = "redirect",
        exists_ok: bool = False,
        existsok: bool = False,
    ) -> QueueHandle:
        """Creates a queue: every row that is written is taken, and acknowledged, once.

        Args:
            name: Name of the store.
            like: One row; its content does not matter.
            max_size: Rows that wait, or are taken and not acknowledged; when it is reached, writers wait.
            sampler: ``tdserve.Fifo()`` (the default), ``Lifo()`` for a stack, ``HighestPriority()`` or
                ``LowestPriority()``.
            policy: As in ``create_replay``; ``take(max_lag=)`` discards rows of older versions.
            ragged: As in ``create_replay``.
            max_object_bytes, durability, checksum, shards, shard_by, on_shard_loss: As in ``create_replay``.
            exists_ok: True returns an existing queue of the same structure and settings.
            existsok: Tensordict's spelling of ``exists_ok``; either of them suffices.

        Raises:
            StoreExistsError, InvalidSpecError, InvalidRequestError, CapacityError: Nothing was created.
        """
        check_one_shard(shards)
        max_size = check_integer("max_size", max_size, 1)
        settings = make_queue_settings(max_size, sampler=sampler, policy=policy)
        options = StoreOptions(exists_ok or existsok, max_object_bytes, durability, checksum=checksum)
        description = create_table(self, name, like, max_size, settings, options, ragged)
        return QueueHandle(self, description)

    def queue(self, name: str, *, timeout_s: float | None = None) -> QueueHandle:
        """Returns the handle of a queue; waits for it if it does not exist yet.

        Raises:
            DeadlineExceededError: It was not created in time.
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            WrongStateError: The store of this name is not a queue.
        """
        return self._open_as(QueueHandle, "queue", "queue", self.describe(name, timeout_s=timeout_s))

    def replay(self, name: str, *, timeout_s: float | None = None) -> ReplayHandle:
        """Returns the handle of a replay store; waits for it if it does not exist yet.

        Raises:
            DeadlineExceededError: It was not created in time.
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
        """
        return self._open_as(ReplayHandle, "replay", "replay", self.describe(name, timeout_s=timeout_s))

    # ------------------------------------------------------------ keyed stores

    def create_kv(
        self,
        name: str,
        like: Any = None,
        max_bytes: int | None = None,
        eviction: Eviction = "none",
        ttl_s: float | None = None,
        exists_ok: bool = False,
        *,
        shards: Shards = 1,
        existsok: bool = False,
    ) -> KeyedHandle:
        """Creates a keyed store: string keys to tensordicts, tensors or values.

        Args:
            name: Name of the store.
            like: An entry, if all are tensordicts or tensors of one structure; its content does not matter. None:
                entries may be anything, each of its own structure.
            max_bytes: Most bytes of all entries with their keys; None: as many as the disk holds.
            eviction: What a put does without room: ``"none"`` raises CapacityError, ``"lru"`` drops entries that were
                not read or written recently.
            ttl_s: Seconds after which an entry is gone; None: never.
            shards: As in ``create_replay``.
            exists_ok: True returns an existing keyed store of the same structure and settings.
            existsok: Tensordict's spelling of ``exists_ok``; either of them suffices.

        Raises:
            StoreExistsError, InvalidRequestError, InvalidSpecError, NotSupportedError, CapacityError: Nothing was
                created.
        """
        check_one_shard(shards)
        description = create_keyed(
            self,
            name,
            like,
            max_bytes=max_bytes,
            eviction=eviction,
            ttl_s=ttl_s,
            exists_ok=exists_ok or existsok,
        )
        return KeyedHandle(self, description)

    def kv(self, name: str, *, timeout_s: float | None = None) -> KeyedHandle:
        """Returns the handle of a keyed store; waits for it if it does not exist yet.

        Raises:
            DeadlineExceededError: It was not created in time.
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            WrongStateError: The store of this name is not a keyed store.
        """
        return self._open_as(KeyedHandle, "keyed store", "kv", self.describe(name, timeout_s=timeout_s))

    # ------------------------------------------------------------ weights

    def publish(
        self,
        name: str,
        td: Any,
        *,
        metadata: dict[str, Any] | None = None,
        keep: int = 0,
        fanout: int = 0,
        dtype: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Publishes the next version of some weights; the first one creates their store.

        Weights are only content: parameters, buffers and ``TensorDictParams`` are read as plain tensors in plain
        tensordicts, unlocked and without grad. ``init_remote`` preserves them.

        Args:
            td: TensorDict (for instance ``TensorDict.from_module(policy)``), ``nn.Module``, or dict of arrays. A module
                is published with its buffers, also non-persistent ones, and with the extra state of its modules.
            metadata: Small values for readers, such as ``{"step": 10}``; at most 1 MiB.
            keep: How many of the newest versions stay readable; 0 keeps the setting (2 at first).
            fanout: To how many readers each holder of a version passes it on, at most. It stays set until another is
                given; 0 leaves the choice to the server.
            dtype: Floating-point leaves are converted to it before they are sent.
            return_early: True returns a future at once. The tensors are read later, also over shared memory: neither
                they nor ``metadata`` may change before it is done, so do not step the optimizer.

        Returns:
            The version, or a future of it; it becomes visible as a whole, and not before. Versions of one client are
            numbered in the order of its calls: a call waits for earlier ones that return early.

        Raises:
            InvalidRequestError, NotSupportedError: Nothing was published; also of a module that saves state which
                cannot be sent, as a quantized one does.
            CapacityError: The server's disk is full. The previous version stays the newest.
        """
        check_store_name(name)
        deadline = self.make_deadline(timeout_s)
        return self.perform_in_turn(
            name,
            lambda: publish(
                self,
                name,
                td,
                self._published,
                metadata=metadata,
                keep=keep,
                fanout=fanout,
                dtype=get_dtype_name(dtype),
                deadline=deadline,
            ),
            deadline,
            return_early,
        )

    def latest(
        self,
        name: str,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        out: Any = None,
        into: nn.Module | None = None,
        select: Any = None,
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
        numpy: bool | None = None,
    ) -> Weights | None:
        """Returns the newest version of some weights; all of its leaves are of one version.

        Args:
            newer_than: Waits for a version above this one.
            timeout_s: With 0 and nothing newer, None is returned.
            out, into, select, device, copy, dtype, numpy: See the class.

        Raises:
            DeadlineExceededError: There was no such version in time.
            SpecMismatchError: ``out`` or ``into`` does not fit; nothing was written to it.
            PeerLostError, ConnectError: The server was lost and did not come back in time; ``out`` or ``into`` may
                contain leaves of several versions.
            KeyNotFoundError: The version has no key of ``select``.
        """
        check_real("reading weights", WEIGHTS)
        wanted = make_wanted(
            name, newer_than, out=out, into=into, select=select, device=device, copy=copy, dtype=dtype, numpy=numpy
        )
        return self._pulls.pull(self, wanted, self.make_deadline(timeout_s))

    def wait_newer(self, name: str, *, newer_than: int | None = None, timeout_s: float | None = None) -> int | None:
        """Waits for a new version of some weights without getting it, and returns its number.

        ``version`` and ``latest`` get the content, ``versions`` the metadata.

        Args:
            newer_than: Waits for a version above this one; None: for any.
            timeout_s: With 0 and nothing newer, None is returned; a longer wait raises DeadlineExceededError.

        Raises:
            DeadlineExceededError: There was no such version in time, and ``timeout_s`` is not 0.
            StoreNotFoundError: There is none of this name, with ``timeout_s=0`` and without ``newer_than``.
            WrongStateError: The store of this name is not one of weights.
        """
        return wait_newer(self, Wanted(name, newer_than=newer_than), self.make_deadline(timeout_s))

    def version(
        self,
        name: str,
        v: int,
        *,
        timeout_s: float | None = None,
        out: Any = None,
        into: nn.Module | None = None,
        select: Any = None,
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
        numpy: bool | None = None,
    ) -> Weights:
        """Returns a certain version of some weights, if it is still kept: see ``versions``.

        Raises:
            VersionNotFoundError: It is not kept any more, or not published yet; the error lists those that are kept.
            Others: As raised by ``latest``, whose arguments these are.
        """
        wanted = make_wanted(
            name, version=v, out=out, into=into, select=select, device=device, copy=copy, dtype=dtype, numpy=numpy
        )
        found = self._pulls.pull(self, wanted, self.make_deadline(timeout_s))
        if found is None:
            reason = f"{name!r} has no version {v} any more; versions() lists those that are kept"
            raise VersionNotFoundError(argument="version", reason=reason)
        return found

    def versions(self, name: str, *, timeout_s: float | None = None) -> list[VersionInfo]:
        """Lists the readable versions of some weights, ascending: number, size, time and metadata of each.

        Raises:
            DeadlineExceededError: The weights were not created in time; with ``timeout_s=0`` StoreNotFoundError.
            WrongStateError: The store of this name is not one of weights.
        """
        description = self.describe(name, timeout_s=timeout_s)
        if description.kind != "weights":
            raise WrongStateError(state=f"store {name!r} does not hold weights", event="versions()")
        return list(description.versions)

    def subscribe(
        self,
        name: str,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        out: Any = None,
        into: nn.Module | None = None,
        select: Any = None,
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
        numpy: bool | None = None,
    ) -> Subscription:
        """Follows some weights: ``for weights in client.subscribe("policy", into=policy): ...``.

        Each step waits for a version above the last one and skips to the newest, so that a slow reader is late but
        never falls behind. A reader that starts late, or again, begins with the newest version. The iteration ends when
        the subscription or the client is closed. It continues after a restart of the server, and with
        the weights of a store that was deleted and created again: their numbers are above the last one.

        Args:
            newer_than: Begins above this version.
            timeout_s: For each wait, which ends in DeadlineExceededError; the next step waits again. ``math.inf`` waits
                without end.
            out, into, select, device, copy, dtype, numpy: See the class.
        """
        wanted = make_wanted(
            name, newer_than, out=out, into=into, select=select, device=device, copy=copy, dtype=dtype, numpy=numpy
        )
        wanted.check()

        def pull(newer_than: int | None, step: Deadline, _: Deadline) -> Weights | None:
            return self._pulls.pull(self, replace(wanted, newer_than=newer_than), step)

        return Subscription(name, pull, partial(self.make_deadline, timeout_s), newer_than=newer_than)

    # ------------------------------------------------------------ groups

    def group(
        self,
        name: str,
        world_size: int,
        rank: int | None = None,
        *,
        backend: str = "gloo",
        device: Any = None,
        interface: str | None = None,
        timeout_s: float | None = None,
    ) -> Group:
        """Joins a group of clients that exchange tensordicts among themselves; the server only introduces them.

        The group is formed once ``world_size`` clients have asked for this name. A client that asks for an existing
        group waits until it is admitted to the next epoch.

        Args:
            name: Name of the group; groups are not stores, and are not kept.
            world_size: Members of the first epoch.
            rank: In the first epoch; None: by order of arrival.
            backend: ``"gloo"``, or ``"nccl"`` for tensors on GPUs; each member then needs a GPU of its own.
            device: CUDA device for the backend nccl; None is the current one.
            interface: Address at which the others reach this member; None: of the interface that reaches the server.

        Raises:
            DeadlineExceededError: The others did not join in time.
            InvalidRequestError: Another member has asked for the same rank, or another size or backend.
            NotSupportedError: NCCL is not available here, or two members share a GPU.
            ConnectError: The members cannot reach one another.
        """
        return join_group(
            self, name, world_size, rank, backend=backend, device=device, interface=interface, timeout_s=timeout_s
        )

    # ------------------------------------------------------------ checkpoints

    def checkpoint(
        self,
        place: Place,
        *,
        keep: int | None = None,
        timeout_s: float = CHECKPOINT_TIMEOUT_S,
        on_progress: OnCheckpoint = lambda _: None,
    ) -> Checkpoint:
        """Writes a checkpoint of all stores of the server to a place, while others use them.

        Stores are copied while they serve; then all are paused for some tens of milliseconds, and the changes since are
        saved apart: the checkpoint has all of them as they were at that moment. If a client is in the middle of a write
        that lasts longer than two seconds, they serve again, and the pause is tried again. What an earlier checkpoint
        of the same place has is not written again. No other client may write checkpoints to it at the same time.
        Adopted folders are not in it. Threads: safe.

        Args:
            place: Path of a folder here, on the client's machine, or a URL of fsspec such as ``"s3://bucket/run"``.
            keep: How many whole checkpoints of this server the place keeps, this one included; None: all.
            timeout_s: For all of it.
            on_progress: Called after each request.

        Returns:
            The checkpoint: ``id``, ``nbytes``, ``written_nbytes``, ``paused_s``, ``left_out``.

        Raises:
            DeadlineExceededError: The time was over; the error names a store that a client was writing at each attempt.
                The place has the checkpoints that it had.
            CapacityError: The place, or the server's disk, is full. The place has the checkpoints that it had.
            InvalidRequestError: The place is in the root of a server, whose next start would remove it, or cannot be
                written.
        """
        deadline = Deadline.after(timeout_s)
        return checkpoint_server(self, place, keep=keep, deadline=deadline, on_progress=on_progress)

    def restore(
        self,
        place: Place,
        *,
        checkpoint: str | None = None,
        names: Collection[str] | None = None,
        prefix: str = "",
        timeout_s: float = CHECKPOINT_TIMEOUT_S,
        on_progress: OnRestore = lambda _: None,
    ) -> list[str]:
        """Brings stores of a checkpoint back, as new stores of this server; its other stores are unaffected.

        Rows have the numbers, priorities and order that they had; generations and later versions get other numbers, so
        that no client takes them for what came after the checkpoint. Versions continue a million higher, which no lag
        counts. Threads: safe.

        Args:
            place: As in ``checkpoint``.
            checkpoint: Its id; None: the newest.
            names: Stores that are brought back; None: all.
            prefix: Put in front of the name of each.
            timeout_s: For all of it.
            on_progress: Called after each block.

        Returns:
            The names of the new stores.

        Raises:
            StoreExistsError: A store has such a name. Nothing was restored.
            StoreNotFoundError: The checkpoint has no such store. Nothing was restored.
            InvalidRequestError: There is no such checkpoint, or it was removed while it was read. Nothing was restored.
            CorruptDataError: A part of it is missing or damaged; the error names the newest that is whole. Nothing
                stays, as after any other error.
        """
        options = RestoreOptions(checkpoint, names, prefix, Deadline.after(timeout_s), on_progress)
        return restore_server(self, place, options)

    # ------------------------------------------------------------ figures

    def stats(self) -> dict[str, Any]:
        """Returns figures of the server and of this client's session, as plain values.

        ``transport`` is this session's. ``why_not_shm`` explains why it is not ``"shm"`` although the client may use
        that, ``why_not_nccl`` why it is not ``"nccl"`` although a GPU was named, and ``why_not_gloo`` why content takes
        the server's own port (``"grpc"``) although ``"auto"`` prefers gloo; else they are ``""``.
        ``transports`` counts bytes and transfers of the whole server by transport. Over shm only transfers are counted:
        no byte passes through the server. ``bytes_relayed`` were sent from client to client.
        """
        session = self._session
        return {
            **self.catalog.stats(),
            "address": self.address,
            "transport": session.transport if session is not None else None,
            "why_not_shm": session.why_not_local if session is not None else "",
            "why_not_nccl": self.why_not_nccl,
            "why_not_gloo": self.why_not_gloo,
            "session": session.welcome.session if session is not None else None,
        }

    def make_movers(self, session: Session) -> ClientMovers:
        """Makes the mover of a session; see the function."""
        return make_movers(self, session)


def _open_table(client: Client, description: StoreDescription) -> ReplayHandle | QueueHandle:
    is_queue = Settings.from_json(description.settings).is_queue
    return QueueHandle(client, description) if is_queue else ReplayHandle(client, description)


_OPENERS: dict[str, Callable[[Client, StoreDescription], AnyHandle]] = {"replay": _open_table, "keyed": KeyedHandle}
"""Makes the handles of the kinds of stores that have one of their own."""
