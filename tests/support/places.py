"""Directories that tests read from."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
VERIFICATION = ROOT / "verification"
JOBS = TESTS / "jobs"
GOLDEN = TESTS / "golden"
AXLEARN_DOUBLE = TESTS / "axlearn_double"
MAXTEXT_DOUBLE = TESTS / "maxtext_double"
