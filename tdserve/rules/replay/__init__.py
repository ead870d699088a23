"""The rules of replay tables: which rows a writer may fill, which rows a reader gets, and which calls must wait.

Plain objects without I/O, clock or threads. Randomness is passed in as a ``numpy.random.Generator``. The caller owns
the mapped generations and records the states that these objects return.

To learn them, read in this order; the other modules are details of these:

1. ``allocation``: which rows a writer may fill (``ring``, ``reservation``), and their generations.
2. ``table_state``, then ``table``: the rows of a table with all state, and every decision about them; ``row_indexes``
   has sets and columns of rows, ``plans`` what comes in and goes out, ``departures`` which rows leave, ``row_ages`` and
   ``sample_ages`` how old those of samples are.
3. ``samplers``: a setting, and the object that draws by it (``sampler``, ``selector``).
4. ``eligibility``: the selectors of a table, one per combination of conditions (``conditional_selectors``).
5. ``draws``: a draw, with its counts and limits; ``rank_draws`` is one for all ranks of a step.
6. ``limiter`` and ``remover``: who waits, and which rows make room. ``settings`` has all of these as JSON, and the
   registry ``RULES``.

The rooms import one another downwards: ``row_indexes``, then ``samplers``, then ``eligibility`` and ``allocation``,
then ``draws``. Of the modules here ``settings`` lies between ``samplers`` and ``eligibility``; the others put the rooms
together.
"""
