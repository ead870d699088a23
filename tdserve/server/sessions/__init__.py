"""The clients of the control process: their sessions, their local connections, and what moves their content.

Read from the top; each imports only those after it:

1. ``local_listener``: the socket of clients on this machine; ``register``: all sessions, from their opening to their
   end; ``admission``: how many there may be.
2. What sessions need around them: ``incoming_parts`` (requests in parts), ``session_ends`` (what may still be done for
   a session) and ``traffic`` (transfers and their counts).
3. ``client_session``: one session, which has movers (``mover``) and perhaps a ``local_client``, and its
   ``session_limits``.
4. ``long_list_file``: lists that are too long for a message; ``clients``: those that are known, with a session or
   without; ``client_reports``: what they report of their own calls.
"""
