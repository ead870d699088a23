"""The structure of a tensordict: as a tree of plain values, as a protobuf message, and from and to tensordicts.

Of what is here each imports only those before it: ``tensordict_private`` and ``torch_private``, for all rooms; then the
rooms, to be read in this order: ``trees`` (plain values and messages), ``tensors``, ``tensordicts`` (what they hold
besides), ``stacks`` (rows that differ), ``captures`` (from a tensordict), ``building`` (to one).

Only this package uses tensordict's private names (``tensordict_private``; those of torch are in ``torch_private``): no
other may call its fast constructors or look into its nodes. ``trees`` never imports torch, because the control process
must not; the other rooms are for processes that handle tensors. Nothing is re-exported here, so that importing one file
does not import torch for another.
"""
