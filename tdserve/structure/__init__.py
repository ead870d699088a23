"""The structure of a tensordict: as a tree of plain values, as a protobuf message, and from and to tensordicts.

Only this room uses tensordict's private names: no other may call its fast constructors or look into its nodes.
``dtypes``, ``nodes``, ``canonical``, ``tree`` and ``codec`` never import torch, because the control process must not;
``torch_types``, ``capture`` and ``build`` are for processes that handle tensors. Nothing is re-exported here, so that
importing one file of the room does not import torch for another.
"""
