"""Stores that move from one server to another, checkpoints, and restores; what moves content is ``movers``. A client
carries their files and what is on record of them.

Read from the top; each imports only those after it:

1. ``move_requests``: the steps of a move, as the two servers serve them.
2. ``checkpoints``: all stores as of one moment; ``restored_settings``: what a table that came back from one takes.
3. ``leaving_stores`` and ``arriving_stores``: the two ends; ``file_lists``: the blocks that have changed.
4. ``sealing``: stores are at rest meanwhile.
"""
