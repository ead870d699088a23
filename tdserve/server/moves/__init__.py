"""Stores that move from one server to another, checkpoints, and restores; what moves content is ``movers``. A client
carries their files and what is on record of them."""
