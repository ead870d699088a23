"""The data worker: a process that maps stores and moves bytes for remote clients. It decides nothing, and writes
generations only in rows that it has claimed (§5.7 of the protocol book).

Its orders come from the control process over a UNIX socket. Every session has a thread of its own, so a client that
stalls delays no other.

Read ``data_worker`` and ``worker_session`` first, then ``lane``, ``operations`` and ``transfers``: a session's orders.
``small_reads``, ``session_writes`` and ``worker_claims`` answer clients without control. ``entry_orders`` are for keyed
stores, ``checksumming`` for versions. ``fork_server`` makes the process, ``handed_sockets`` and ``descriptors`` are
about its sockets, ``observed_work`` and ``spans`` about its figures.
"""
