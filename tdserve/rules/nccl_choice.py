"""Decides whether the content of a session moves from GPU to GPU."""

from __future__ import annotations


def why_not_nccl(
    asked: str, *, client_gpu: str, worker_gpu: str, why_no_gpu: str = "", is_one_machine: bool = False
) -> str:
    """Returns why the content of a session does not go by NCCL; "" if it does. Both ends ask before they call NCCL.

    Args:
        asked: The client's transport.
        client_gpu, worker_gpu: Unique ids of the GPUs of both ends; "" if there is none.
        why_no_gpu: Why the worker has none.
        is_one_machine: Whether both ends run on one kernel.
    """
    if asked not in ("auto", "nccl"):
        return f"{asked!r} was asked for"
    if not client_gpu:
        return "the client has no GPU that NCCL can use"
    if not worker_gpu:
        return f"the server's data worker has no GPU: {why_no_gpu or 'none was named (tdserve serve --device cuda:N)'}"
    if client_gpu == worker_gpu:
        return f"both ends use one GPU, {client_gpu}, which NCCL refuses; content is staged in pinned memory instead"
    if asked == "auto" and is_one_machine:
        return "both ends are on one machine, whose memory is nearer; content is staged in pinned memory"
    return ""
