"""Several servers as one: where each store is, and stores that several servers share.

Begin with ``cluster_client``, which has the calls of a client of one server; ``at_home`` makes those about a store that
one server has. They use what follows, of which each imports only those before it: ``sums`` (of figures); and the rooms
``servers`` (where each store is), ``moves`` (from server to server), ``stores`` (what several servers share),
``tables`` (replays and queues of these).

``cluster_catalog`` is for commands, which import no torch.
"""
