"""What makes stores survive a loss of power, and keeps their files small.

Read ``syncing`` first, whose passes run in ``sync_process``, a process of its own; then ``power_loss``, which goes back
to the last of them. ``compaction`` frees, at a start, the space of overwritten values.
"""
