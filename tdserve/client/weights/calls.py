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
    """Adds weights: versions that are published whole, and pulled.

    What ``latest``, ``version`` and ``subscribe`` share:

    * ``out`` is a tensordict that is filled in place, received into directly where its leaves are contiguous CPU
      tensors. ``into`` is an ``nn.Module`` whose parameters and buffers are: they stay the same objects, with their
      ``requires_grad`` and whatever an optimizer keeps of them; names and shapes must be equal, and dtypes but that
      floating-point numbers are converted, as ``load_state_dict`` does. ``data`` is the module then.
    * Leaves that have not changed since the version that was pulled before do not travel (over the network, from a
      mebibyte on): they are taken from ``out`` or ``into``, or from the tensordict that was returned last if it is
      still there. Their checksums are compared, so it does not matter what was done to them in between.
    * ``dtype`` is one of floating-point numbers, such as ``torch.bfloat16``: leaves of floating-point numbers are
      converted to it before they travel, whole.
    * ``copy=False`` maps the version's file instead, over the transport ``shm``: nothing is copied, whatever the
      size, and all processes share the memory. What is written into these tensors stays in this process, so they are
      not locked, as those of ``StoreHandle.map`` are. The file lives as long as any of them. With ``dtype``, or over
      another transport, it makes no difference.
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
        """Publishes the next version of some weights; the first makes their store.

        Weights are content only: parameters, buffers and ``TensorDictParams`` come back as plain tensors in plain
        tensordicts, unlocked and without grad. ``init_remote`` keeps what they are.

        Args:
            td: TensorDict (for instance ``TensorDict.from_module(policy)``) or ``nn.Module``.
            metadata: Small values for readers, such as ``{"step": 10}``; 1 MiB at most.
            keep: Newest versions that stay readable; 0 leaves it as it is (2 at first).
            fanout: How many readers whoever has a version passes it on to, at most, kept until another is given; 0
                leaves that to the server.
            dtype: Leaves of floating-point numbers are converted to it before they are sent.

        Returns:
            The version, or a future of it; it is visible whole, and only then.

        Raises:
            InvalidRequestError, NotSupportedError: Nothing was published.
            CapacityError: The server's disk is full. The version before stays the newest.
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
        """The newest version of some weights, one version whole.

        Args:
            newer_than: Waits for a version above this one.
            timeout_s: With 0 and nothing newer, None is returned.
            out, into, device, copy, dtype: See the class.

        Raises:
            DeadlineExceededError: There was none in time.
            SpecMismatchError: ``out`` or ``into`` does not fit; nothing was written to it.
            PeerLostError, ConnectError: The server went away, and did not come back in time; ``out`` or ``into`` may
                hold leaves of several versions.
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
        """A certain version of some weights, which must be one of those that are kept: see ``versions``.

        Raises:
            InvalidRequestError: It is not kept any more, or was not published yet; names those that are.
            Others: As ``latest``, whose arguments these are.
        """
        wanted = Wanted(name, version=v, out=out, into=into, device=device, copy=copy, dtype=dtype_name(dtype))
        found = self._pulls.pull(wanted, self.deadline(timeout_s))
        if found is None:
            raise WrongStateError(state="nothing newer", event=f"version {v} of {name!r}")
        return found

    def versions(self, name: str, *, timeout_s: float | None = None) -> list[VersionInfo]:
        """The versions of some weights that can be read now, ascending: number, size, time and metadata of each.

        Raises:
            DeadlineExceededError: The weights did not exist in time; with ``timeout_s=0`` StoreNotFoundError.
            WrongStateError: The store of this name holds no weights.
        """
        description = self.describe(name, timeout_s=timeout_s)
        if description.kind != "weights":
            raise WrongStateError(state=f"store {name!r} holds no weights", event="versions()")
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
        never behind; a reader that comes late, or again, begins with the newest there is. Ends when the subscription or
        the client is closed. Goes on when the server was restarted. Of a store that was deleted and made anew it waits
        for a number above the last one it had.

        Args:
            newer_than: Begins above this version.
            timeout_s: Of each wait, which ends in DeadlineExceededError; the next step waits on. ``math.inf`` waits
                without end.
            out, into, device, copy, dtype: See the class.
        """
        wanted = Wanted(
            name, newer_than=newer_than, out=out, into=into, device=device, copy=copy, dtype=dtype_name(dtype)
        )
        return Subscription(self, self._pulls, wanted, timeout_s=timeout_s)
