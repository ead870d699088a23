"""The client: what a user's process does. One session per client object, opened when first needed, reopened when
lost.

Its rooms import one another downwards: ``local`` and ``relays`` lie below the session, ``groups`` and ``datasets``
above the calls; on these lie ``handles``, ``tables``, ``memmap`` and ``weights``, one on the other. What several of
them need, or what knows of several, lies here.
"""
