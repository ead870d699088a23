"""The byte formats of content and requests: layouts, index expressions, row numbers, non-tensor values.

``layout`` and ``content`` are the bytes of a transfer, ``selection`` are index expressions. ``row_numbers``,
``row_sets``, ``changed_blocks`` and ``long_lists`` are long lists in messages. ``store_kinds`` and ``call_names`` are
names, ``store_figures`` and ``span_attributes`` say what figures and spans tell.
"""
