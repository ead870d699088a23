"""Version files: one per published version of a weights store, in safetensors' layout, mapped and recycled.

Read ``versions`` first, then ``version_format`` (the layout), ``version_names`` (the states of a file), and
``version_mappings`` with ``version_filling`` and ``version_locks``. ``version_ends`` are its ends in a transfer;
``version_checksums`` are of leaves, ``version_marks`` of what has reached the disk.
"""
