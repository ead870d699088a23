"""How answers look in a terminal and as JSON. Nothing here asks a server; the status page, ``bench`` and
the demo use it too.

Read ``render`` first: cells, tables, lines and JSON, with ``chats`` for the chats among values. ``narrow_table`` fits a
table into a terminal, ``leaf_table`` shows the structure of a store, ``progress`` how far a command is, and
``hidden_figures`` are those that a token does not see.
"""
