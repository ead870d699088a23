"""Rows that differ: lazy stacks, nested tensors, and nodes whose elements carry their own structure.

Here is what a capture of them and their building share: ``common_structure``, ``elements``, ``annotation``,
``restacking`` and ``shared_rows``.

Capture: ``stack_capture`` (in ``captures``) joins rows of one structure (``common_structure``), and splits others into
elements (``elements``); ``annotation`` notes what the elements alone would not restore. Build: in ``building``,
``packing`` is the stored form of an element; ``assembly`` makes entries and tensordicts of elements, as whole ones by
their notes (``gathering``) or by what they have in common (``restacking``); ``deferred`` puts that off until something
is read.
"""
