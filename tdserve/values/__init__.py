"""Non-tensor values as bytes, and back; several of them as columns, and those of a row as a bundle.

Read ``value_codec`` first, then ``supported`` (which types) and ``extensions`` (how). ``value_columns`` and
``value_bundles`` are several values, ``pickled`` those of users who allow it.
"""
