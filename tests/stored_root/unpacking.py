"""Makes copies of the stored root."""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.stored_root.make import TARGET


def unpack_root(root: Path) -> Path:
    """Makes a copy of the stored root."""
    with tarfile.open(TARGET) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # from 3.11.4 on
        archive.extractall(root)
    return root
