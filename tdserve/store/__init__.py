"""Files and mappings: the only package that owns ``mmap``, ``lmdb`` and file names. No ``OSError`` and no
``lmdb.Error`` leaves it.

Its rooms, of which each imports only those before it: ``disk`` (files, mappings, errors), ``database`` (LMDB), ``rows``
(tensors), ``values`` (all else), ``weights`` (version files), ``durability`` (syncs, damage), ``exchange`` (from
process to process), ``roots`` (the folder of a server). Begin with ``roots/root.py`` and the layout
(``<root>`` is the folder given to ``tdserve serve``)::

    <root>/tdserve.json  tdserve.lock  nonce     roots/root.py                 who owns the root; proof of one machine
    <root>/run.json                              roots/run_record.py           whether the last run has ended in order
    <root>/catalog/                              database/catalog_db.py        LMDB, written by the control process only
    <root>/synced/                               durability/sync_pass.py       a copy of the catalog as of the last sync
    <root>/synced/sums.json                      roots/file_sums.py            checksums of files as of the last orderly
                                                                               end
    <root>/sessions/<id>                         roots/root.py                 a lock file per local session
    <root>/requests/                             roots/root.py                 content that requests have sent ahead
    <root>/arriving/<move>/                      roots/root.py                 a store that comes from another server
    <root>/checkpoints/<id>/                     roots/root.py                 what is kept for a checkpoint under way
    <root>/stores/<name>/record.json             roots/record_file.py          what the catalog has of the store
    <root>/stores/<name>/rows/                   rows/format.py                a plain tensordict memmap folder
    <root>/stores/<name>/extra/                  rows/format.py                the tensor leaves that this format cannot
                                                                               carry
    <root>/stores/<name>/adopted.json            rows/adopted.py               of an adopted store: rows/ leads
                                                                               elsewhere
    <root>/stores/<name>/generation.memmap       rows/generations.py           one int64 per row, written by control,
                                                                               and by a local client or a worker in rows
                                                                               that it has claimed (§5.7 of the protocol
                                                                               book)
    <root>/stores/<name>/claims/                 rows/claim_file.py            a file for each claim: both ends' numbers
    <root>/stores/<name>/columns/                rows/row_columns.py           what a table's rules keep per row
    <root>/stores/<name>/synced.memmap           durability/watermark.py       generations and checksums as of the last
                                                                               sync
    <root>/stores/<name>/synced-values/          values/value_copy.py          the values of that moment
    <root>/stores/<name>/compared                durability/row_comparison.py  readers compare rows with these checksums
    <root>/stores/<name>/used.memmap             values/use_marks.py           which entries of a keyed store were used
                                                                               lately
    <root>/stores/<name>/objects/                values/objects.py             LMDB of non-tensor values by (row, key)
    <root>/stores/<name>/objects.<n>/            values/object_folders.py      where they lie since they were compacted
    <root>/stores/<name>/versions/*.safetensors  weights/versions.py           one file per published version
    <root>/stores/<name>/versions/synced.json    weights/version_marks.py      which of them had reached the disk
    <root>/stores/<name>/staging/*.staging       exchange/staging.py           bytes that arrived whole and are not yet
                                                                               copied in

``rows/mapping``, ``rows/shown_memory``, ``exchange/staging`` and, in ``weights``, ``versions``, ``version_mappings``
and ``version_ends`` make torch tensors of mapped files. The other modules need no torch, so the control process may
import them.

Importing this package does nothing: import each module by its own name.
"""
