"""What a shell and its user expect of every command, whatever it does.

Read ``options`` first: what the commands that ask a server share. ``number_types`` are the numbers of a command line,
``completion`` completes commands, options and names. ``exit_codes`` has the code of each error, ``advice`` puts an
error in a shell's words, ``held_warnings`` shows the client's warnings after the answer, and ``lasting`` is for
commands that run until they are told to end.
"""
