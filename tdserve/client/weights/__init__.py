"""Versions of weights: published, pulled and followed.

Read ``publication`` and ``pulls`` first, then ``subscription``. A pull takes one of these ways: ``full_version``,
``deltas`` (leaves that have changed), ``local_versions`` (from the files), ``relay_taking`` (from another client).
``version_part`` is a part that a reader asks for. ``module_destination`` and ``module_misfits`` are for modules,
``lru_names`` is a cache.
"""
