"""The GPU that a client names to the server, to receive its content."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tdserve.base.errors import InvalidRequestError, NcclUnavailableError, NotSupportedError
from tdserve.client.content.devices import resolve_device
from tdserve.rules.nccl_choice import why_not_nccl
from tdserve.transport.nccl import gpu_uuid
from tdserve.v1 import control_pb2


class Gpu(NamedTuple):
    """A GPU of this process.

    Attributes:
        device: Its name here, such as ``"cuda:0"``; "" for none.
        uuid: Identifies it among all GPUs; "" if NCCL cannot use it.
        why_not: Why NCCL cannot use it.
    """

    device: str
    uuid: str
    why_not: str = ""


NO_GPU = Gpu("", "")


def find_gpu(device: torch.device | str | int | None, *, transport: str) -> Gpu:
    """Returns the GPU that a client names.

    Args:
        device: CUDA device; None names none, or the thread's current one if ``transport`` is ``"nccl"``.
        transport: The transport that the client asks for.

    Raises:
        InvalidRequestError: It is not a CUDA device.
        NotSupportedError: There is no such device here, or ``transport`` is ``"nccl"`` and NCCL cannot use it.
    """
    if device is None and transport != "nccl":
        return NO_GPU
    try:
        wanted = resolve_device("cuda" if device is None else device)
    except NotSupportedError as error:
        if transport != "nccl":
            raise
        raise NotSupportedError(feature="transport 'nccl'", reason=str(error.fields["reason"])) from error
    if wanted is None or wanted.type != "cuda":
        raise InvalidRequestError(argument="device", reason=f"{str(wanted)!r} is not a CUDA device")
    if transport not in ("auto", "nccl"):
        return Gpu(str(wanted), "", f"{transport!r} was asked for")
    try:
        return Gpu(str(wanted), gpu_uuid(str(wanted)))
    except NotSupportedError as error:
        if transport == "nccl":
            raise
        return Gpu(str(wanted), "", str(error.fields["reason"]))


def choose_device(welcome: control_pb2.Welcome, gpu: Gpu, *, transport: str, address: str) -> tuple[str, str]:
    """Decides whether a session uses the client's GPU, once the server has answered; does not use NCCL yet.

    Args:
        welcome: The server's answer.
        gpu: The GPU that the client has named.
        transport: The transport that it asked for.
        address: Of the server, for errors.

    Returns:
        The GPU's name if content moves from GPU to GPU, else ""; and the reason if it does not.

    Raises:
        NcclUnavailableError: NCCL was asked for and cannot be used.
    """
    why_not: str = welcome.why_not_nccl
    if welcome.transport == "nccl":
        why_not = why_not_nccl(transport, client_gpu=gpu.uuid, worker_gpu=welcome.gpu)
        if not why_not:
            return gpu.device, ""
    if transport == "nccl":
        raise NcclUnavailableError(address=address, reason=why_not or "the server gives no reason")
    return "", why_not


def landing(gpu: str, device: torch.device | str | int | None) -> torch.device | None:
    """Returns the GPU on which content is received, if the session's channel ends there; None for the CPU.

    Args:
        gpu: The session's; "" for none.
        device: Where the content will be moved.
    """
    wanted = resolve_device(device) if gpu else None
    return wanted if str(wanted) == gpu else None
