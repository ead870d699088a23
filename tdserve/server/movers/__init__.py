"""The movers of a session's content: its data worker, its local client, or both.

Begin with ``session_mover``, what all movers share. Then read from the top; each imports only those after it:

1. ``choosing``: which of the others moves what of a session.
2. ``worker_mover``: of a client on the network; ``permit_mover``: of a local client, which copies content itself.
3. ``mover_context``: the parts of the control process that movers use; ``session_mover``; ``value_writes``: non-tensor
   values, which one worker stores.
"""
