"""Tensordict stores by name: tensordict's own calls, with a store's name in place of a rank or path."""
