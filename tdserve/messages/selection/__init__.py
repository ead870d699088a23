"""Index expressions as data."""
