"""The GPU that a client names to the server, to receive its content."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.client.content.devices import resolve_device
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS, ChannelChoice, SessionEnds, check_granted
from tdserve.transport.nccl import read_gpu_uuid
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
        device: CUDA device; None names none, or the thread's current one if ``transport`` needs one.
        transport: The transport that the client asks for.

    Raises:
        InvalidRequestError: It is not a CUDA device.
        NotSupportedError: There is no such device here, or ``transport`` needs one and NCCL cannot use this one.
    """
    needs_device = transport in CHANNEL_TRANSPORTS and CHANNEL_TRANSPORTS[transport].needs_device
    if device is None and not needs_device:
        return NO_GPU
    try:
        wanted = resolve_device("cuda" if device is None else device)
    except NotSupportedError as error:
        if not needs_device:
            raise
        raise NotSupportedError(feature=f"transport {transport!r}", reason=str(error.fields["reason"])) from error
    if wanted is None or wanted.type != "cuda":
        raise InvalidRequestError(argument="device", reason=f"{str(wanted)!r} is not a CUDA device")
    if transport != "auto" and not needs_device:
        return Gpu(str(wanted), "", f"{transport!r} was asked for")
    try:
        return Gpu(str(wanted), read_gpu_uuid(str(wanted)))
    except NotSupportedError as error:
        if needs_device:
            raise
        return Gpu(str(wanted), "", str(error.fields["reason"]))


def check_channel(welcome: control_pb2.Welcome, gpu: Gpu, *, transport: str, address: str) -> ChannelChoice:
    """Returns the transport of a session's channel, once the server has answered; opens nothing yet.

    Args:
        welcome: The server's answer.
        gpu: The GPU that the client has named.
        transport: The transport that it asked for.
        address: Address of the server, for errors.

    Raises:
        NcclUnavailableError, NotSupportedError: A transport was asked for by name and cannot be used.
    """
    granted = ChannelChoice(welcome.transport, welcome.why_not)
    return check_granted(transport, granted, SessionEnds(gpu.uuid, welcome.gpu), address=address)


def find_landing_device(gpu: str, device: torch.device | str | int | None) -> torch.device | None:
    """Returns the GPU on which content is received, if the session's channel ends there; None for the CPU.

    Args:
        gpu: The session's; "" for none.
        device: Where the content will be moved.
    """
    wanted = resolve_device(device) if gpu else None
    return wanted if str(wanted) == gpu else None
