"""Reserving and touching slots in the background: nothing that was asked for is dropped."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tiers_support import LAYOUT, complete_save, held_steps, open_tier, save_id

from emergency_ckpt import _native
from emergency_ckpt.errors import LocalTierError, RamdiskFull
from emergency_ckpt.ram import LocalTier

LONG_S = 60.0
SMALL_BYTES = 1 << 20
LARGE_BYTES = 4 << 20


class Gate:
    """Holds the background thread inside its first ``reserve``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first_fails: bool = False) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.reserved: list[int] = []
        reserve = LocalTier.reserve

        def gated(tier: LocalTier, slot_bytes: int) -> None:
            self.reserved.append(slot_bytes)
            self.entered.set()
            assert self.open.wait(LONG_S)
            if first_fails and len(self.reserved) == 1:
                raise RamdiskFull("reserve", "slots", "no space left")
            reserve(tier, slot_bytes)

        monkeypatch.setattr(LocalTier, "reserve", gated)


def ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "eckpt-prefault":
            thread.join(LONG_S)
            assert not thread.is_alive()


def slot_sizes(tier: LocalTier) -> list[int]:
    return [path.stat().st_size for path in tier.path.glob("slot_?.bin")]


@pytest.mark.parametrize("first_fails", [False, True])
def test_request_during_an_earlier_one_is_reserved_too(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, *, first_fails: bool
) -> None:
    """A second restore, of a larger state, soon after the first."""
    gate = Gate(monkeypatch, first_fails=first_fails)
    tier = open_tier(ramdisk)
    tier.prefault_in_background(SMALL_BYTES)
    assert gate.entered.wait(LONG_S)
    tier.prefault_in_background(LARGE_BYTES)
    tier.prefault_in_background(SMALL_BYTES)
    tier.prefault_in_background()
    gate.open.set()
    ended()
    assert gate.reserved == [SMALL_BYTES, LARGE_BYTES]
    assert slot_sizes(tier) == [LARGE_BYTES, LARGE_BYTES]
    tier.prefault_in_background(2 * LARGE_BYTES)
    ended()
    assert slot_sizes(tier) == [2 * LARGE_BYTES] * 2, "also once that thread had ended"


def test_slots_made_while_others_are_touched_are_touched_too(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, goes_on = threading.Event(), threading.Event()
    touched: list[int] = []

    def prefault(
        mapping: _native.Mapping, offset: int, nbytes: int, threads: int, *, written: bool
    ) -> None:
        assert not written, "this process has made them"
        entered.set()
        assert goes_on.wait(LONG_S)
        touched.append(nbytes)

    monkeypatch.setattr(_native, "prefault", prefault)
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    tier.prefault_in_background()
    assert entered.wait(LONG_S)
    tier.reserve(LARGE_BYTES)
    tier.prefault_in_background()
    goes_on.set()
    ended()
    assert touched.count(LARGE_BYTES) >= 2


@pytest.mark.parametrize(("published", "newest_bytes"), [(True, LARGE_BYTES), (False, SMALL_BYTES)])
def test_start_maps_what_its_restore_needs_alone(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, *, published: bool, newest_bytes: int
) -> None:
    """An older step beside the newest would only take the cores from it."""
    tier = open_tier(ramdisk)
    tier.reserve(SMALL_BYTES)
    if published:
        complete_save(tier, 1)
        tier.reserve(LARGE_BYTES)
        complete_save(tier, 2)
    tier.close()
    touched: list[tuple[int, bool]] = []

    def prefault(
        mapping: _native.Mapping, offset: int, nbytes: int, threads: int, *, written: bool
    ) -> None:
        touched.append((mapping.size_bytes, written))

    monkeypatch.setattr(_native, "prefault", prefault)
    tier = open_tier(ramdisk)
    tier.map_newest_in_background()
    ended()
    assert touched == [(newest_bytes, True)]
    tier.prefault_in_background()
    ended()
    assert len(touched) == 3


def test_slot_that_is_reserved_after_the_close_is_given_back(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may need longer for a slot than the close waits."""
    tier = open_tier(ramdisk)
    allocate = os.posix_fallocate

    def slow(fd: int, offset: int, size: int) -> None:
        allocate(fd, offset, size)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        tier.close()

    monkeypatch.setattr(os, "posix_fallocate", slow)
    with pytest.raises(LocalTierError, match="the tier was closed"):
        tier.begin_write(save_id(1), LAYOUT.size_bytes)
    again = open_tier(ramdisk, start="another")
    complete_save(again, 1)
    assert held_steps(again) == [1]
