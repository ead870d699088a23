"""What a client learns of the stores of a server. No torch, no session.

Read ``catalog_client`` first; then ``description``, with ``structure_leaves`` and ``structure_text``: a store, and its
structure, as they are shown. ``message_facts`` are figures of a message.
"""
