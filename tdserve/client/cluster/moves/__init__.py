"""Moves of stores between servers, and checkpoints of all servers.

Read from the top; each imports only those before it: ``cut_short_moves`` (whose movers were lost), ``store_move`` (one
move), ``cluster_checkpoints``, ``cluster_moves`` (the calls of a cluster's client).
"""
