"""Rows that differ: lazy stacks, nested tensors, and nodes whose elements carry their own structure.

Capture: ``stack_capture`` joins rows of one structure (``common_structure``), and splits others into elements
(``elements``); ``annotation`` notes what the elements alone would not restore. ``packing`` is the stored form of an
element. Build: ``assembly`` makes entries and tensordicts of elements, as whole ones by their notes (``gathering``) or
by what they have in common (``restacking``); ``deferred`` puts that off until something is read.
"""
