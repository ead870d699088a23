"""Content of existing stores: rows are read and written, whole or not at all; keys are added, renamed and removed.

Read from the top; each imports only those after it:

1. ``reads``: a worker sends the content, or a local client reads it itself.
2. ``writes``: whole or absent, also after a crash; ``in_place``: those of local clients, straight over the old content;
   ``expected_generations``: the rows that a write expects.
3. ``alterations``: changes of keys.
"""
