"""Tests of the soak find its modules."""

from __future__ import annotations

import sys

from places import VERIFICATION

sys.path.insert(0, str(VERIFICATION / "soak"))
