"""Which rows a writer may fill.

Read ``ring`` first: the cursor, its holes and its reservations (``reservation``, ``row_pins``, ``rows_in_line``); then
``claims``: rows that a writer takes by itself, with ``claim_pacing`` (when it gets more) and ``promises`` (of several
writers each a block). ``shared_numbers`` shows all processes which rows there are, ``uncommitted_rows`` those that this
process alone knows of.
"""
