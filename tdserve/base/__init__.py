"""What every floor builds on: errors, ids, settings, addresses, deadlines. No torch, no stores, no messages.

``errors`` has the exception tree. The other modules, by what they are about:

1. Calls: ``deadline`` (one timeout for all steps), ``call_times`` (how long calls took), ``timed_queue``,
   ``failpoints`` (steps at which tests end a process), ``trace_parent``.
2. What callers, peers and disks give: ``ids`` and ``integers``, ``arguments`` and ``setting_checks``.
3. The settings of a server: ``config``, ``config_file`` and ``server_options``, with ``adoptions`` (folders that are
   served in place).
4. Processes: ``logs``, ``machine``, ``torchrun_rank``, ``worker_arguments`` (of data workers) and ``client_setup`` (of
   clients that the server starts).
5. The network: ``addresses``, ``tls`` and ``token_file``.
"""
