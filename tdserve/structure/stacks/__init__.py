"""Lazy stacks, and what else holds rows that differ: how they are taken apart, stored, and put together again."""
