"""Commands that show rows of a store that is in use. Nothing they read counts as sampled.

Read ``head`` with ``first_rows`` first; then ``tail`` with ``new_rows``, which finds what is new since the last look.
``pictures`` are the images among the rows. The status page uses ``first_rows`` and ``pictures`` too.
"""
