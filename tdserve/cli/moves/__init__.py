"""Commands that move whole stores, or compare them with their checksums.

Read ``checkpoint`` and ``restore`` first: to a place of checkpoints and back. ``check_root`` (``tdserve check``) checks
such a place, or a root. ``rebalance`` moves stores from server to server.
"""
