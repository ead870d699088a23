"""Messages between processes: gRPC between clients and control, framed protobuf between control and data workers.

The only room that touches ``grpc``; foreign errors are turned into ``tdserve.errors`` here, in ``status``.
"""
