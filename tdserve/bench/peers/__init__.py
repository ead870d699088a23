"""``tdserve bench peers``: tdserve beside what users could take instead, in the same minutes on one machine.

Read ``contender`` first: what each system is asked to do. ``tdserve_contender``, ``torchrl_contender``,
``redis_contender`` and ``ray_contender`` are one system each, used as its own documents show; ``peer_jobs`` has what is
measured, and ``peers_run`` has the systems take turns and prints the table.
"""
