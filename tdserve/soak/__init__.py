"""A long run of all kinds of clients while processes are killed, whose content and use of the machine are checked.

``activities`` is what a client does, ``working_client`` the process that does it, ``check`` compares the content with
the histories, ``rounds`` runs all this, ``process_figures`` measures, ``slopes`` and ``verdicts`` judge what was
measured. The kill campaign of the tests shares all but the rounds.

``history`` is what a client did, ``killable_client`` its process as the owner sees it, ``round_stores`` are the stores
of a run, ``server_under_test`` is its server, and ``job_stories`` explain jobs that were consumed twice.
"""
