"""The control process: the only owner of every decision. It never touches tensor content, and never imports torch.

Its rooms, of which each imports only those before it:

1. ``execution`` (how any request runs), ``access`` (who may make it), ``recovery`` (records of what is under way).
2. ``open_store`` (one open store), ``processes`` (data workers and others), ``sessions`` (the clients), ``mutations``
   (changes of what is stored), ``kinds`` (of stores), ``catalog`` (all stores).
3. ``weights``, ``durability``, ``checking``; ``kv``, ``tables``, ``tensordicts``: what is done with stores of each
   kind; ``movers`` (content), ``moves`` (whole stores).
4. ``dispatch``: which request goes where.

What puts them together is here. Read ``server_process`` (the program, which starts with ``start_lines``), ``serving``
(from the acquisition of the root to the orderly end, which ``root_watch`` may bring about), ``control_process`` (all
parts behind the methods of the service), and ``observation`` (its figures). ``README.md`` has the ways of a row, and
reading orders of features that several rooms decide.
"""
