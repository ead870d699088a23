"""A structure as plain values, and as a message. Nothing here imports torch, because the control process must not.

Read ``dtypes``, ``nodes`` and ``tree`` first: the parts of a structure, and the whole; then ``canonical`` (its
fingerprint) and ``codec`` (its message, whose every field is checked). ``matching`` and ``difference`` compare two,
``changes`` and ``altering`` make another, ``version_subset`` takes a part.
"""
