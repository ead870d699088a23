"""TorchRL's weight synchronisation over a tdserve server: published once, pulled by any number of receivers."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme, register_weight_sync_backend

from tdserve.base.config import TransportName
from tdserve.base.errors import ClosedError, DeadlineExceededError, SpecMismatchError, TDServeError, WrongStateError
from tdserve.base.tls import TLS
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.client.weights.pulls import Weights
from tdserve.torchrl.forward_guard import ForwardGuard
from tdserve.torchrl.receivers import Receivers, ReceiverState

STEP_S = 5.0
"""Longest wait of one request for a new version, which another follows."""

EXTRA_STATE = "__extra_state__"
"""Under which TorchRL sends what a module has beside parameters and buffers."""

RETRY_PAUSE_S = 0.5
"""Pause after an attempt that failed."""

_OF_PROCESS = frozenset(
    (
        "_own_transport",
        "_transport_pid",
        "_is_shut_down",
        "_lock",
        "_guard",
        "_sent_model",
        "_applied_weights",
        "_newest_taken",
        "_applied_s",
        "_last_error",
        "version",
    )
)
"""Attributes that are not pickled."""

_inherited: list[Any] = []
"""Clients of the parent of a forked child, kept alive: their end would close what the parent uses."""

_log = logging.getLogger("tdserve.torchrl")


class TDServeTransport:
    """A client of this process, and the calls that a scheme makes with it; TorchRL's ``TransportBackend``.

    Args:
        address, transport, token, timeout_s, tls: As in ``tdserve.connect``.
        name: Name of the weights.
        dtype: To which floating-point leaves are converted before they are sent.
    """

    def __init__(
        self,
        address: str | None,
        name: str,
        *,
        transport: TransportName,
        token: str | None,
        timeout_s: float,
        dtype: torch.dtype | None,
        tls: TLS | None = None,
    ) -> None:
        self.client: Client = connect(address, transport=transport, token=token, timeout_s=timeout_s, tls=tls)
        self.receivers = Receivers(self.client, name)
        self._name = name
        self._dtype = dtype

    def send_weights(self, weights: Any, *, wants_confirmation: bool = False) -> int:
        """Publishes weights; returns their version."""
        metadata = {"wants_confirmation": wants_confirmation}
        content = weights if isinstance(weights, (TensorDictBase, nn.Module)) else TensorDict(weights)
        version: int = self.client.publish(self._name, content, metadata=metadata, dtype=self._dtype)
        return version

    def fetch(self, newer_than: int | None, timeout_s: float | None) -> Weights | None:
        """Returns a newer version, as ``Client.latest`` does."""
        return self.client.latest(self._name, newer_than=newer_than, timeout_s=timeout_s)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Returns the newest weights, applied to the model if there is one; None if there are none in time."""
        try:
            found = self.fetch(None, timeout)
        except DeadlineExceededError:
            return None
        if found is not None and model is not None and strategy is not None:
            strategy.apply_weights(model, found.data)
        return None if found is None else found.data


@register_weight_sync_backend("tdserve")
class TDServeWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc, unused-ignore]  # torchrl has no types
    """Synchronises a policy over a tdserve server: one process publishes, any number of others receive.

    A collector needs only ``weight_sync_schemes={"policy": TDServeWeightSyncScheme(address)}``. Each
    ``update_policy_weights_`` publishes a version, and each worker pulls it in a thread of its own and applies it
    between two forward passes, never within one (unless the policy is compiled: torch then runs it past the hooks of
    modules). A worker may be handed a policy on the meta device: it gets its weights from the first version. With
    ``track_policy_version=True`` rows have, in ``("next", "policy_version")``, the number of the version with which
    they were made, the one that :meth:`tdserve.Client.versions` lists.

    A receiver that a collector does not start calls ``init_on_receiver(model_id=, model=)`` and ``connect()``; it
    follows all publishers, also by :meth:`tdserve.Client.publish`. As in TorchRL the model belongs to the
    caller: a scheme does not keep it alive.

    Args:
        address: Address of the server; None: as in ``tdserve.connect``.
        name: Name of the weights.
        strategy: As in TorchRL: how weights are read from a module.
        sync: Whether ``send`` waits until the collector's workers have applied the version.
        transport, token, timeout_s, tls: As in ``tdserve.connect``. The time is also that of every wait for workers.
        dtype: To which floating-point weights are converted before they are sent, such as ``torch.bfloat16``; they are
            converted back when they are applied.

    Attributes:
        name: As given.
        version: The version that was published or applied last; 0 before the first.
    """

    def __init__(
        self,
        address: str | None = None,
        name: str = "policy",
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        sync: bool = True,
        transport: TransportName = "auto",
        token: str | None = None,
        timeout_s: float = 30.0,
        dtype: torch.dtype | None = None,
        tls: TLS | None = None,
    ) -> None:
        super().__init__(strategy)
        self.name = name
        self.sync = sync
        self.timeout_s = timeout_s
        self._settings: dict[str, Any] = {
            "transport": transport,
            "token": token,
            "timeout_s": timeout_s,
            "dtype": dtype,
            "tls": tls,
        }
        self._address = address
        self._newest_before: int | None = None
        self._receivers_of_collector: tuple[str, ...] = ()
        self._begin()

    def _begin(self) -> None:
        """Sets what belongs to one process."""
        self._is_shut_down = False
        self._own_transport: TDServeTransport | None = None
        self._transport_pid = 0
        self._lock = RLock()
        self._guard = ForwardGuard()
        self._sent_model: Any = None
        self._applied_weights: Weights | None = None
        self._newest_taken: int | None = None
        self._applied_s = 0.0
        self._last_error = ""
        self.version = 0

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in super().__getstate__().items() if name not in _OF_PROCESS}
        return {**kept, "_sender_transports": None, "_receiver_transport": None, "_weights": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    # ------------------------------------------------------------ what can be seen

    @property
    def last_error(self) -> str:
        """What failed last in this receiver since the last version was applied; "" if nothing did."""
        return self._last_error

    @property
    def age_s(self) -> float:
        """Seconds since this receiver applied its weights; infinite before the first."""
        return time.time() - self._applied_s if self._applied_s else math.inf

    def receivers(self) -> dict[str, ReceiverState]:
        """Returns what each receiver reported last, by the number of its worker: version, age, last error.

        A receiver without a number is named by its host and process.
        """
        return self._transport.receivers.list_states()

    # ------------------------------------------------------------ sender

    def _init_on_sender_impl(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        num_workers: int | None = None,
        devices: Sequence[Any] = (),
        params_map: dict[int, Any] | None = None,
        **_: Any,
    ) -> None:
        self._is_shut_down = False
        self.model_id = model_id
        if context is not None:
            self.context = context
        if model is not None:
            self.model = self._sent_model = model  # TorchRL holds a model weakly, and a caller may hold it no more
        self.weights = weights if params_map is None else next(iter(params_map.values()), None)
        if num_workers is None:
            num_workers = getattr(context, "num_workers", 0) or len(devices) or len(params_map or ())
        self._receivers_of_collector = tuple(map(str, range(num_workers)))
        # Workers that are started from here wait for what this publisher sends, not for what an earlier one left.
        self._newest_before = self._transport.client.wait_newer(self.name, newer_than=0, timeout_s=0) or 0
        self._transport.receivers.clear()
        self._register_worker_sender(worker_idx=0, transport=self._transport)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self.version = self._transport.send_weights(self._prepare(weights))  # its workers are starting: none waits

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publishes weights, for all receivers; with ``sync`` waits until the collector's workers act with them.

        Args:
            weights: As in TorchRL; None: those of the collector's policy.
            worker_ids: The workers to wait for; None: all.

        Raises:
            DeadlineExceededError: Workers did not apply the version in time; the error names them.
            WrongStateError: Workers could not apply it; the error has their reasons.
        """
        if not self.synchronized_on_sender:
            raise WrongStateError(state="connect() was not called on the sender", event="send()")
        workers = self._list_workers(worker_ids) if self.sync else ()
        self.version = self._transport.send_weights(self._prepare(weights), wants_confirmation=bool(workers))
        if workers:
            self._transport.receivers.wait_applied(workers, self.version, self.timeout_s)

    def _prepare(self, weights: Any) -> Any:
        prepared = self.prepare_weights(
            weights=weights, model_id=self.model_id, strategy=self._strategy, context=self.context
        )
        with suppress(AttributeError):  # TorchRL raises it where there is neither a model nor a collector
            prepared = self.weights if prepared is None else prepared
        if prepared is None:
            raise WrongStateError(state=f"there is no model {self.model_id!r}", event="a publication of its weights")
        return prepared

    def _list_workers(self, worker_ids: int | list[int] | None) -> tuple[str, ...]:
        if worker_ids is None:
            return self._receivers_of_collector
        return tuple(map(str, [worker_ids] if isinstance(worker_ids, int) else worker_ids))

    # ------------------------------------------------------------ receiver

    @property
    def model(self) -> Any:
        """The model that gets the weights."""
        return WeightSyncScheme.model.fget(self)

    @model.setter
    def model(self, model: Any) -> None:
        with self._lock:  # the receiver's thread may be applying a version, to the model before
            WeightSyncScheme.model.fset(self, model)
            if self.initialized_on_receiver and model is not None:
                self._guard.guard(model)
                if self._applied_weights is not None:  # a collector may have copied it before the last version came
                    self._apply(self._applied_weights)

    @property
    def context(self) -> Any:
        """The collector, if there is one."""
        return WeightSyncScheme.context.fget(self)

    @context.setter
    def context(self, context: Any) -> None:
        with self._lock:  # as for a model
            WeightSyncScheme.context.fset(self, context)
            if self.initialized_on_receiver:
                self._stamp(self.version)

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        self._is_shut_down = False
        self.model_id = model_id
        self.context = context
        self.worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        self.model = self.model if model is None else model
        self._register_transport_receiver(transport=self._transport)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        self.worker_idx = self.worker_idx if worker_idx is None else worker_idx
        found = self._transport.fetch(self._newest_before, self.timeout_s)
        if found is not None:
            self._take(found)
            if self._last_error:
                raise WrongStateError(state=self._last_error, event="connect()")
        self._start_background_receiver()

    def receive(self, timeout: float | None = None) -> Any:
        """Applies a newer version if there is one within ``timeout`` seconds, and returns its weights, else None.

        The receiver's own thread does the same all the time.
        """
        try:
            found = self._transport.fetch(self._newest_taken, 0 if timeout is None else timeout)
        except DeadlineExceededError:
            return None
        return None if found is None or not self._take(found) else found.data

    def _background_receive_loop(self) -> None:
        stop = self._stop_event
        while not stop.is_set():
            try:
                found = self._transport.fetch(self._newest_taken, STEP_S)
                if found is not None:
                    self._take(found)
            except DeadlineExceededError:
                continue
            except ClosedError:  # by shutdown()
                return
            except TDServeError as error:
                self._note(str(error))
                stop.wait(RETRY_PAUSE_S)

    def _take(self, found: Weights) -> bool:
        """Applies a version, unless a newer one was taken; reports it, or why it could not be applied."""
        with self._lock:
            if self._newest_taken is not None and found.version <= self._newest_taken:
                return False
            self._newest_taken = found.version
            error = ""
            try:
                self._apply(found)
                self._applied_weights, self.version, self._applied_s, self._last_error = (
                    found,
                    found.version,
                    time.time(),
                    "",
                )
            except Exception as fault:  # noqa: BLE001 (what a model raises; its worker continues with older weights)
                error = f"{type(fault).__name__}: {fault}"
        self._note(error)
        if found.metadata.get("wants_confirmation"):
            with suppress(TDServeError):  # the sender's wait ends with its timeout
                self._transport.receivers.confirm(self._receiver, found.version, error)
        return not error

    def _apply(self, found: Weights) -> None:
        model, context = self.model, self.context
        if model is None:
            raise WrongStateError(state=f"the model {self.model_id!r} is gone", event="an update of its weights")
        _check_fits(found.data, model, self.name)  # TorchRL would apply the leaves before the one that does not fit
        weights = found.data if self.strategy_str == "tensordict" else found.data.to_dict()
        with self._guard.change():
            self._strategy.apply_weights(model, weights, inplace=not _is_meta(model))
            if self.model_id == "policy" and hasattr(context, "update_policy_weights_"):
                context.update_policy_weights_(model_id=self.model_id, policy_or_weights=weights)  # and those below it
            self._stamp(found.version)

    def _stamp(self, version: int) -> None:
        """Gives rows that are made from now on the number of the applied version."""
        tracker = getattr(self.context, "policy_version_tracker", None)
        if tracker is not None and version:
            tracker.version = version

    def _note(self, error: str) -> None:
        if error:
            self._last_error = error
            _log.warning("weights %r in receiver %s: %s", self.name, self._receiver, error)
        with suppress(TDServeError):  # it is reported with the next version
            self._transport.receivers.report(self._receiver, self.version, self._applied_s, self._last_error)

    @property
    def _receiver(self) -> str:
        index = self.worker_idx
        return f"{socket.gethostname()}:{os.getpid()}" if index is None else str(index)

    # ------------------------------------------------------------ this process's client

    @property
    def _transport(self) -> TDServeTransport:
        if self._is_shut_down:
            raise ClosedError(what="the weight sync scheme")
        if self._own_transport is None or self._transport_pid != os.getpid():  # a fork has no threads
            if self._own_transport is not None:
                _inherited.append(self._own_transport)
            self._own_transport, self._transport_pid = self.create_transport(), os.getpid()
        return self._own_transport

    def create_transport(self, **_: Any) -> TDServeTransport:
        """Connects to the server."""
        return TDServeTransport(self._address, self.name, **self._settings)

    def shutdown(self) -> None:
        """Ends the receiver's thread and closes the client. Idempotent."""
        self._is_shut_down = True
        made, self._own_transport = getattr(self, "_own_transport", None), None
        if getattr(self, "_stop_event", None) is not None:
            self._stop_event.set()
        if made is not None and self._transport_pid == os.getpid():
            made.client.close()  # ends a wait for a version
        super().shutdown()


def _check_fits(weights: TensorDictBase, model: Any, name: str) -> None:
    """Raises SpecMismatchError for weights that a module has no place for."""
    if not isinstance(model, nn.Module):
        return
    places = _list_shapes(TensorDict.from_module(model))
    for key, shape in _list_shapes(weights).items():
        if not key.startswith(EXTRA_STATE) and places.get(key) != shape:
            expected = f"shape {tuple(places[key])}" if key in places else "no such parameter"
            raise SpecMismatchError(store=name, key=key, expected=expected, actual=f"shape {tuple(shape)}")


def _list_shapes(weights: TensorDictBase) -> dict[str, torch.Size]:
    paths = weights.keys(include_nested=True, leaves_only=True)
    return {path if isinstance(path, str) else ".".join(path): weights.get(path).shape for path in paths}


def _is_meta(model: Any) -> bool:
    parameters = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return any(parameter.is_meta for parameter in parameters)
