"""From a request of a session to the part of the server that answers it.

``session_messages`` parts requests from notices. Read ``requests``, the router, then ``services``, which puts all
handlers together. ``store_requests`` and ``groups`` are handlers themselves: of stores that come and go, and of groups.
``request_sizes`` is the memory that a request will take.
"""
