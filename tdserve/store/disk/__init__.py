"""The ground of this package: files, shared mappings and sealed records, and which error a fault of them becomes.

Read ``faults`` (the only table of errors) and ``files`` (syncs and replaces) first; then ``mapped`` (mappings without a
descriptor), ``sealed`` (records with a checksum), ``checked_json`` (small files with one) and ``held_folder`` (a folder
that stays the same one whatever becomes of its name).
"""
