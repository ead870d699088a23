"""Messages between processes: gRPC between clients and control, frames of protobuf on local sockets.

The only room that touches ``grpc``; foreign errors are turned into ``tdserve.base.errors`` here, in ``status``.

gRPC asks for its support of ``fork`` before it is imported for the first time, and without it a forked child that opens
a client of its own dies now and then while the parent has one (seen in one of thirty). With it a fork waits up to a
second for the parent's threads to come out of gRPC.
"""

from __future__ import annotations

from tdserve.base.config import variable_set

with variable_set("GRPC_ENABLE_FORK_SUPPORT", "1"):
    import grpc  # noqa: F401
