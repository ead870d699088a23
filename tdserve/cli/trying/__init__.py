"""Commands that need no server of yours: they try tdserve out, or explain it.

Read ``demo`` first; ``bench`` measures, ``soak`` runs all kinds of clients under kills, ``guide`` shows the pages of
the guide, and ``version`` the versions.
"""
