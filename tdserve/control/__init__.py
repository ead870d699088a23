"""Messages between processes: gRPC between clients and control, frames of protobuf on local sockets.

The only room that touches ``grpc``; foreign errors are turned into ``tdserve.base.errors`` here, in ``status``.

gRPC must be told to support ``fork`` before it is first imported. Without it a forked child that opens a client of its
own sometimes dies while the parent has one (seen in one of thirty). With it a fork waits up to a second until the
parent's threads have left gRPC.

gRPC: ``connection`` is the client's end, ``servicer`` the server's. ``content_stream`` and ``content_relay`` are the
two ends of streams with content, ``credentials`` has TLS, ``audit`` the log of refused calls. ``parts`` and
``parsed_size`` are about large messages, ``silence`` finds out why a server does not answer, ``bare_stream`` is a floor
for benchmarks. Local sockets: ``local`` (clients), ``framing`` (data workers), ``lending`` (descriptors) and ``outbox``
(sends that may hang). ``forking`` keeps threads out of gRPC during a fork.
"""

from __future__ import annotations

from tdserve.base.config import hold_variable

with hold_variable("GRPC_ENABLE_FORK_SUPPORT", "1"):
    import grpc  # noqa: F401
