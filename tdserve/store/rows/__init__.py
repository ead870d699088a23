"""The tensors of a store, row by row: its folder, its generations, and its files beside them.

Read in this order:

1. ``format``: a plain tensordict memmap folder, as a plan; ``leaf_folders`` creates it, ``mapping`` opens it as
   tensors.
2. ``generations``: one number per row; ``row_columns``: others, for control's rules; ``row_sums``: checksums.
3. ``claim_file``: in it a writer claims rows by itself.
4. ``adoptable``, ``adopted`` and ``shown_memory``: tensors that lie in a user's folder, and stay there.
5. ``restructuring``: changes of the files with the structure.
"""
