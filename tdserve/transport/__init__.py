"""Bytes from process to process: channels (gloo, loopback), reusable buffers, and the walk over a layout's messages.

The only room that touches ``torch.distributed``. It knows layouts and tensors, not stores, sessions or gRPC.
"""
