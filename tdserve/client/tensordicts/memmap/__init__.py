"""tensordict's memmap family, with a store's name in place of the path."""
