"""The processes that the control process starts, orders to them, and whatever processes may claim rows.

Read in this order:

1. ``fork_server_process``, then ``worker_processes``: how data workers come to be; ``exit_reasons``: why one ended.
2. ``workers``: a data worker with its orders, restarted when it dies.
3. ``claim_writers`` and ``claim_holder``: processes that take rows of tables by themselves.
4. ``client_process``: a process that is a client of the server, such as ``observer_process``.
"""
