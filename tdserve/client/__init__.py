"""The client: the part of tdserve in a user's process. One session per client object, opened when first needed, and
reopened when it is lost.

Its rooms import one another downwards: ``content``, then ``local`` and ``relays``, then ``session`` and ``transfers``,
then ``movers``, ``groups``, ``datasets`` and ``moves``, then ``handles``, then ``kv``, ``tables``, ``tensordicts`` and
``weights``. ``client`` puts them together, and ``cluster`` the clients of several servers.
"""
