"""The rules of replay tables: which rows a writer may fill, which rows a reader gets, and which calls must wait.

Plain objects without I/O, clock or threads. Randomness is passed in as a ``numpy.random.Generator``. The caller owns
the mapped generations and records the states that these objects return.

To learn them, read in this order; the other modules are details of these:

1. ``allocation``: which rows a writer may fill (``ring``, ``reservation``), and their generations.
2. ``table``: its parts together. ``table_state`` has the rows, and all state that the parts share (``row_totals``: how
   many have come, and were sampled); ``table_arrivals`` decides how rows come, ``table_samples`` how they are drawn,
   ``table_leases`` what their owners do with them, and ``departures`` how they leave. ``row_indexes`` has sets and
   columns of rows, ``plans`` what comes in and goes out, ``row_ages`` and ``sample_ages`` how old the rows of samples
   are.
3. ``samplers``: a setting, and the object that draws by it (``sampler``, ``selector``).
4. ``eligibility``: the selectors of a table, one per combination of conditions (``conditional_selectors``).
5. ``draws``: a draw, with its counts and limits; ``rank_draws`` is one for all ranks of a step.
6. ``limiter`` and ``remover``: who waits, and which rows make room. ``settings`` has all of these as JSON, and the
   registry ``RULES``.

Of all that is here each imports only those before it: ``row_indexes``, ``samplers``, ``allocation``, ``limiter``,
``remover``, ``settings``, ``eligibility``, ``draws``, ``plans``, ``row_ages``, ``row_totals``; ``table_state``; its
users ``table_arrivals``, ``table_samples``, ``table_leases``, ``departures`` and ``sample_ages``, none of which imports
another; ``table``; ``rank_draws``.
"""
