"""Differences between the oldest tensordict that tdserve supports and the newest. Tests that need the newest are
skipped."""

from __future__ import annotations

import pytest
import tensordict

IS_OLD = str(tensordict.__version__).startswith("0.14.")


def skip_old(reason: str) -> pytest.MarkDecorator:
    """Skips a test with tensordict 0.14, which behaves differently here."""
    return pytest.mark.skipif(IS_OLD, reason=f"tensordict 0.14 {reason}")
