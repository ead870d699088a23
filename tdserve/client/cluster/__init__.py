"""Several servers as one: where each store is, and stores that several servers share.

Begin with ``cluster_client``, which has the calls of a client of one server; ``at_home`` makes those about a store that
one server has. Its rooms, of which each imports only those before it: ``servers`` (where each store is), ``moves``
(from server to server), ``stores`` (what several servers share), ``tables`` (replays and queues of these).

``cluster_catalog`` and ``sums`` are for commands, which import no torch.
"""
