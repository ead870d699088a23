"""Which rows a sample may draw at all.

Read ``conditions`` and ``conditional_selectors`` first: the selectors of a table, one per combination of conditions.
The others decide on rows: ``staleness`` (with ``skipped_versions``), ``group_selector``, ``consumers``,
``written_keys``, and ``leases`` (with ``lease_ends``).
"""
