"""Stores as tensordicts: the handle, its views, and every call that a tensordict has.

Read ``handle`` and ``view`` first. Both have ``tensordict_calls``; a handle also has ``schema_calls`` (keys), and a
view ``view_calls`` and ``view_steps``. ``write_calls``, ``overwriting`` and ``operators`` are the calls that write or
calculate.

``tensordict_names`` says how each of tensordict's methods is answered. ``store_client`` is the client of one store,
``schema_changes`` are its requests, and ``skeletons`` tell what a call would do. ``key_list`` and ``key_paths`` are
keys; ``coerce`` and ``local_values`` prepare what is written. ``live_stores`` and ``mapped_leaves`` find leaves on the
server.
"""
