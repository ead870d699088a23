"""The rules of replay tables: which rows a writer may fill, which rows a reader gets, and which calls must wait.

Plain objects without I/O, clock or threads. Randomness is passed in as a ``numpy.random.Generator``. The caller owns
the mapped generations and records the states that these objects return.
"""
