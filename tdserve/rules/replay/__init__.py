"""The rules of replay tables: which rows a writer may fill, which rows a reader gets, and which calls must wait.

Plain objects without I/O, clock or threads. Randomness is passed in as a ``numpy.random.Generator``. The caller owns
the mapped generations and records the states that these objects return.

To learn them, read in this order; the other modules are details of these:

1. ``ring``: which rows a writer may fill (``reservation``), and their generations.
2. ``table_state``, then ``table``: the rows of a table with all state, and every decision about them; ``columns`` has
   what is kept per row, ``plans`` what comes in and goes out.
3. ``sampler`` and ``selector``: a setting, and the object that draws by it. ``prioritized`` is a good example.
4. ``conditions`` and ``conditional_selectors``: the selectors of a table, one per combination of conditions
   (``staleness``, ``group_selector``, ``written_keys``, ``leases`` decide on rows).
5. ``drawing``: a draw, with its counts and limits.
6. ``limiter`` and ``remover``: who waits, and which rows make room. ``settings`` has all of these as JSON, and the
   registry ``RULES``.
"""
