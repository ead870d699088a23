"""The rules of replay tables: which rows a writer may fill, which a reader gets, and who must wait.

Plain objects without I/O, clock or threads. Randomness comes in as a ``numpy.random.Generator``; whoever calls owns the
mapped generations and writes down the states that these objects hand out.
"""
