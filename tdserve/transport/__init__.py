"""Moves bytes between processes: channels (gloo, NCCL, loopback), reusable buffers, transfers of a layout's messages.

The only room that touches ``torch.distributed``. It handles layouts and tensors, not stores, sessions or gRPC.

Read ``channel`` first, the contract, then ``session_channels``: one entry for each transport. The channels are
``gloo``, ``nccl``, ``loopback`` and ``stream_channel`` (over ``byte_streams``), with ``ordered`` and
``message_channel`` on top of others.

1. Transfers: ``stream`` (a whole layout), with ``sources_sinks``, ``appended``, ``copy_ahead``, ``pool`` and
   ``tag_queues``.
2. How gloo's groups come and go: ``rendezvous``, ``channel_forming``, ``forming_groups``, ``ending_groups`` and
   ``blocking_threads``; ``proven`` and ``proving`` have ranks prove who they are, ``strangers`` are those who cannot.
   ``gloo_reasons`` puts its errors in words.
3. NCCL: ``nccl_groups`` makes groups, ``staging_pool`` has their memory.
4. Groups of clients: ``group_content``, by ``group_gloo`` or ``group_nccl``, reduced by ``group_ring``.

``distributed_private`` has the private names of ``torch.distributed``.
"""
