"""Stores as tensordicts: the handle, its views, and every call that a tensordict has."""
