"""Commands that move whole stores.

Read ``checkpoint`` and ``restore`` first: to a place of checkpoints and back. ``rebalance`` moves stores from server to
server.
"""
