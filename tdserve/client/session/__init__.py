"""The connection of a client to its server: sessions, calls, and what identifies both.

Its rooms, of which each imports only those before it: ``calls`` (deadlines, retries, futures), ``channels`` (what a
session exchanges with its server), ``requests`` (those under way), ``catalog`` (what is known of stores).

What puts them together is here. Read ``session_client`` (what handles and calls hold) and ``session`` (its end of one
session) first; ``session_opener``, ``one_port`` and ``client_connections`` open and end sessions, ``store_changes``
creates and deletes stores, and ``store_options`` says how, ``by_address`` and ``recipe`` make handles work in every
process, ``finalizing`` and ``process_exit`` end what is left.
"""
