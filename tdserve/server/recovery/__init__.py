"""Recovery after a crash: records of what is under way, its repair, and the proof that a writer is gone.

``journal``, ``redo_log``, ``reserved``, ``claim_records``, ``lost_rows``, ``restructured`` and ``departure_records``
have a kind of record each; ``writer_records`` has what those of local writers share, and ``process_watch`` finds out
when such a writer is gone. ``draw_records`` are in a table of their own, ``draws``; all others are in the table
``pending`` of the catalog.

UID is the incarnation of a store; LOCK names the writer; NUM distinguishes its records.

=========================  =====================================================  ===================================
key                        written                                                read after a restart by
=========================  =====================================================  ===================================
last-commit                with each commit, before its rows become even          ``Stores.restore``
long-commit-UID            likewise, with one that takes several turns            ``Stores.restore``
claims:UID:LOCK:NUM        before a writer may claim rows, and with each commit   the opening; ``Claiming.restore``
                           of some of them
alter:UID                  with the new structure, before files move              ``Alterations.repair``
apply:UID                  before staged content replaces live rows               the opening; ``Writes.repair``
reserved:UID:LOCK:NUM      before a local client fills reserved rows; for rows    the opening: they are free once the
                           that leave a table while it overwrites them            client is proved gone
overwrites:UID:LOCK:NUM    before a local client overwrites live rows; for rows   the opening: those still odd are lost,
                           that were found damaged                                unless their write was complete
last-overwrite             with the answer to the latest overwrite of few rows    the opening: that write was complete
departure:UID              with the answer, before rows leave their table         the opening: they leave
=========================  =====================================================  ===================================

``server/README.md`` has a reading order of recovery, and its steps as calls ("After a restart"). After a loss of power,
``forget_writers`` deletes all records but those of ``alter`` and ``departure``.
"""
