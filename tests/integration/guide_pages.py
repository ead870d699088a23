"""The examples of the pages of the guide."""

from __future__ import annotations

from pathlib import Path


def python_of(page: Path) -> str:
    """The examples of a page on the lines where they stand there, so that a traceback names the page's line."""
    kept, is_python = [], False
    for line in page.read_text().splitlines():
        is_fence = line.startswith("```")
        kept.append(line if is_python and not is_fence else "")
        is_python = line == "```python" or (is_python and not is_fence)
    return "\n".join(kept)
