"""From a tensordict to its structure, its tensors and its values; copies nothing, changes nothing.

Read ``capture`` and ``captured`` first; then ``node_capture``, ``leaf_capture`` and ``stack_capture``. ``rows``
captures single rows of one structure, ``array_dicts`` dicts of arrays (and, by ``listed_numbers``, of numbers),
``unbatched`` what all rows share. ``capture_cache`` and ``known_structures`` make a second capture cheap; ``adapting``,
``declaring`` and ``fake_tensors`` fit one to another structure, to what a user declares, and to none.
"""
