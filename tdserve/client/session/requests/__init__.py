"""The requests of a session that are under way, with their content.

Read ``request_numbers`` and ``pending`` first: a request, and its number; then ``open_requests`` and
``abandoned_requests``: all of a session. ``client_mover`` moves content, ``outgoing`` is that of one write,
``known_stores`` the structures that reads need not bring, and ``elsewhere`` is for calls about stores that have moved.
"""
