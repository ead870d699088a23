"""Tensordict stores by name: tensordict's own calls, with a store's name in place of a rank or path.

Read ``tensordict_client`` first: the calls. ``new_tensordict`` and ``store_filling`` create stores, ``reading`` and
``loading`` read them. ``memmap_arguments`` are those of tensordict's memmap family.
"""
