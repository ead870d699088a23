"""The server's rules: plain objects without I/O, clock and threads.

``replay`` is a package with a reading order of its own; so are ``kv`` (keyed stores) and ``access`` (tokens).
``catalog`` has the records of all stores, ``settings_text`` their settings as text. ``weights`` decides on versions,
``fanout`` on who gets one from whom, ``group_rule`` on members of groups, ``request_log`` on retries. ``placement``,
``shard_division`` and ``lost_servers`` are for several servers. ``channel_transports``, ``tags`` and
``trusted_network`` are about channels.
"""
