"""The client: the part of tdserve in a user's process. One session per client object, opened when first needed, and
reopened when it is lost.

Its rooms, of which each imports only those before it: ``content``, ``local`` and ``relays``, ``session`` and
``transfers``, ``movers``, ``groups``, ``datasets`` and ``moves``, ``handles``, ``kv``, ``tables``, ``tensordicts`` and
``weights``. ``client`` puts them together, ``cluster`` the clients of several servers; ``connecting`` makes either of
both.
"""
