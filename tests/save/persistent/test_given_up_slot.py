"""A bucket still takes the bytes of a slot after the save of it was given up."""

from __future__ import annotations

from pathlib import Path

from programs import printed_beside_bucket


def test_slot_that_tensorstore_still_sends_is_not_written(ramdisk: Path) -> None:
    """Four local saves of other values come before storage takes the bytes of the first."""
    found = printed_beside_bucket("given_up_slot_program.py", str(ramdisk), timeout_s=250)
    assert found == {"slots": 3, "is_step": True, "failed": 1, "sources": ["slot", "slot"]}
