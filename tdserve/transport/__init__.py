"""Moves bytes between processes: channels (gloo, NCCL, loopback), reusable buffers, transfers of a layout's messages.

The only room that touches ``torch.distributed``. It handles layouts and tensors, not stores, sessions or gRPC.
"""
