"""The part of a client that publishes weights and follows them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tdserve.base.config import TransportName
from tdserve.base.errors import WrongStateError
from tdserve.client.content.fake_modes import WEIGHTS, check_real
from tdserve.client.session.description import VersionInfo
from tdserve.client.tensordicts.memmap.family import MemmapClient
from tdserve.client.weights import publishing
from tdserve.client.weights.subscription import Subscription
from tdserve.client.weights.versions import Pulls, Wanted, Weights, dtype_name


class WeightsClient(MemmapClient):
    """A client that publishes and pulls weights; each version is published as a whole.

    What ``latest``, ``version`` and ``subscribe`` share:

    * ``out`` is a tensordict that is filled in place. If its leaves are contiguous CPU tensors they are received into
      directly. ``into`` is an ``nn.Module`` whose parameters and buffers are filled: they stay the same objects, with
      their ``requires_grad`` and their optimizer state. Names and shapes must be equal, and dtypes too, except that
      floating-point numbers are converted, as by ``load_state_dict``. ``data`` is then the module.
    * Leaves that have not changed since the last pulled version are not sent again (over the network, from a mebibyte
      on). They are taken from ``out`` or ``into``, or from the tensordict that was returned last if it still exists.
      Their checksums are compared, so it does not matter what was done to them in between.
    * ``dtype`` is a floating-point one, such as ``torch.bfloat16``: all floating-point leaves are converted to it
      before they are sent, and all of them are sent.
    * ``copy=False`` maps the version's file instead, over the transport ``shm``: nothing is copied, whatever the size,
      and all processes share the memory. Writes into these tensors stay in this process, so they are not locked, just
      like those of ``StoreHandle.map``. The file exists as long as any of them. With ``dtype``, or over another
      transport, it has no effect.
    """

    def __init__(
        self,
        address: str,
        *,
        transport: TransportName = "auto",
        token: str | None = None,
        timeout_s: float = 30.0,
        allow_pickle: bool = False,
        root: str | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(
            address,
            transport=transport,
            token=token,
            timeout_s=timeout_s,
            allow_pickle=allow_pickle,
            root=root,
            device=device,
        )
        self._pulls = Pulls(self)
        self._published = publishing.Published()

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
            td: TensorDict (for instance ``TensorDict.from_module(policy)``) or ``nn.Module``.
            metadata: Small values for readers, such as ``{"step": 10}``; at most 1 MiB.
            keep: How many of the newest versions stay readable; 0 keeps the setting (2 at first).
            fanout: To how many readers each holder of a version passes it on, at most. It stays set until another is
                given; 0 leaves the choice to the server.
            dtype: Floating-point leaves are converted to it before they are sent.

        Returns:
            The version, or a future of it; it becomes visible as a whole, and not before.

        Raises:
            InvalidRequestError, NotSupportedError: Nothing was published.
            CapacityError: The server's disk is full. The previous version stays the newest.
        """
        deadline = self.deadline(timeout_s)

        def publish() -> int:
            return publishing.publish(
                self,
                name,
                td,
                self._published,
                metadata=metadata,
                keep=keep,
                fanout=fanout,
                dtype=dtype_name(dtype),
                deadline=deadline,
            )

        return self.perform(publish, return_early)

    def latest(
        self,
        name: str,
        *,
        newer_than: int | None = None,
        timeout_s: float | None = None,
        out: Any = None,
        into: nn.Module | None = None,
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
    ) -> Weights | None:
        """Returns the newest version of some weights; all of its leaves are of one version.

        Args:
            newer_than: Waits for a version above this one.
            timeout_s: With 0 and nothing newer, None is returned.
            out, into, device, copy, dtype: See the class.

        Raises:
            DeadlineExceededError: There was no such version in time.
            SpecMismatchError: ``out`` or ``into`` does not fit; nothing was written to it.
            PeerLostError, ConnectError: The server was lost and did not come back in time; ``out`` or ``into`` may
                contain leaves of several versions.
        """
        check_real("reading weights", WEIGHTS)
        wanted = Wanted(
            name, newer_than=newer_than, out=out, into=into, device=device, copy=copy, dtype=dtype_name(dtype)
        )
        return self._pulls.pull(wanted, self.deadline(timeout_s))

    def version(
        self,
        name: str,
        v: int,
        *,
        timeout_s: float | None = None,
        out: Any = None,
        into: nn.Module | None = None,
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
    ) -> Weights:
        """Returns a certain version of some weights, if it is still kept: see ``versions``.

        Raises:
            InvalidRequestError: It is not kept any more, or was not published yet; the error lists those that are kept.
            Others: As raised by ``latest``, whose arguments these are.
        """
        wanted = Wanted(name, version=v, out=out, into=into, device=device, copy=copy, dtype=dtype_name(dtype))
        found = self._pulls.pull(wanted, self.deadline(timeout_s))
        if found is None:
            raise WrongStateError(state="nothing newer", event=f"version {v} of {name!r}")
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
        device: Any = None,
        copy: bool = True,
        dtype: Any = None,
    ) -> Subscription:
        """Follows some weights: ``for weights in client.subscribe("policy", into=policy): ...``.

        Each step waits for a version above the last one and skips to the newest, so that a slow reader is late but
        never falls behind. A reader that starts late, or again, begins with the newest version. The iteration ends when
        the subscription or the client is closed. It goes on after a restart of the server. If the store was deleted and
        created again, it waits for a number above the last one.

        Args:
            newer_than: Begins above this version.
            timeout_s: For each wait, which ends in DeadlineExceededError; the next step waits again. ``math.inf`` waits
                without end.
            out, into, device, copy, dtype: See the class.
        """
        wanted = Wanted(
            name, newer_than=newer_than, out=out, into=into, device=device, copy=copy, dtype=dtype_name(dtype)
        )
        return Subscription(self, self._pulls, wanted, timeout_s=timeout_s)
