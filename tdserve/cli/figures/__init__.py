"""Commands that show the figures of one server, or of each server of a cluster.

Read ``server_figures`` first: one question to each server. ``sessions`` and ``top`` show the answers; ``top_screen`` is
the screen of ``top`` and ``figure_facts`` its JSON. ``stats`` shows the figures of ``tdserve info``.
"""
