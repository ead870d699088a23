"""The workloads: each writes and reads its own stores and yields its figures one by one.

Read ``replays`` first, with its rounds (``replay_rounds``). ``mixed`` and ``many_clients`` have several processes at
once. ``weight_trees``, ``keyed``, ``chat``, ``small`` and ``data_loader`` are about one kind of use each.
``compared_rows`` measures the cost of checksums, ``many_stores`` and ``occupancy`` that of many stores and sessions.
"""
