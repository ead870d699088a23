"""The relays of a client: it keeps versions of weights, and passes them on to other clients over hops.

Read ``relay`` first; then ``kept_version``, which it keeps, and ``relay_hop``, by which it goes on.
"""
