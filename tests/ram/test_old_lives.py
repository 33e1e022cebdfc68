"""A start beside a process of an earlier start that still holds the ramdisk."""

from __future__ import annotations

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from other_processes import other_process
from tiers_support import held_steps, open_tier

from emergency_ckpt.errors import LocalTierError
from emergency_ckpt.ram import LocalTier, leftovers
from emergency_ckpt.ram import locks as claims

LONG_S = 120.0


def names(ramdisk: Path) -> list[str]:
    return sorted(path.name for path in (ramdisk / "run-7").iterdir())


@pytest.mark.parametrize("index", [0, 7])
def test_start_beside_an_old_life_names_pid_host_and_step(ramdisk: Path, index: int) -> None:
    """Process 0 of the old life has the directory; this start's own name is free or taken."""
    with other_process(ramdisk, "old_life", "0"):
        owner = claims.read_owner(os.open(ramdisk / "run-7" / "process_00000", os.O_RDONLY))
        assert owner is not None
        with pytest.raises(LocalTierError) as caught:
            open_tier(ramdisk, process_index=index)
        assert f"process {owner.pid} on host {socket.gethostname()} holds" in str(caught.value)
        assert "with step 40" in str(caught.value)
        assert "most of twice stall_timeout_s" in str(caught.value)
        assert names(ramdisk) == ["process_00000"]


def test_start_takes_over_when_the_old_life_ends(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(leftovers.logging, "warning", lambda *_: waiting.set())
    with ThreadPoolExecutor(1) as pool:
        with other_process(ramdisk, "old_life", "0"):
            opened = pool.submit(open_tier, ramdisk, wait_s=LONG_S)
            assert waiting.wait(LONG_S)
            assert not opened.done()
        tier = opened.result(LONG_S)
    assert tier.path.name == "process_00000"
    assert held_steps(tier) == [40]
    tier.close()


def test_adoption_beside_an_old_life_is_an_error(ramdisk: Path) -> None:
    """Another process of the old life lives: its directory is not this process's own."""
    with other_process(ramdisk, "old_life", "3"):
        (ramdisk / "run-7" / "process_00003").rename(ramdisk / "run-7" / "moved")
        tier = open_tier(ramdisk)
        (ramdisk / "run-7" / "moved").rename(ramdisk / "run-7" / "process_00003")
        with pytest.raises(LocalTierError, match="an earlier life of the run is not over"):
            tier.adopt_orphans()
        tier.close()


def test_second_tier_in_one_process_is_an_error_at_once(ramdisk: Path) -> None:
    first = open_tier(ramdisk, start="first")
    with pytest.raises(LocalTierError, match="this process has a checkpointer of that run"):
        open_tier(ramdisk, start="second", wait_s=LONG_S)
    first.close()
    open_tier(ramdisk, start="second").close()


def test_holder_without_a_record_of_its_own_is_given_time(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held, and the record is of a process that is dead: it may be replaced soon."""
    open_tier(ramdisk, start="dead").close()
    path = ramdisk / "run-7" / "process_00000"
    record = (path / claims.OWNER_LOCK).read_text()
    dead = re.sub(r'"born":\d+', '"born":1', record)
    with other_process(ramdisk, "old_life", "0"):
        (path / claims.OWNER_LOCK).write_text(dead)
        monkeypatch.setattr(leftovers, "SETTLE_S", 0.2)
        with pytest.raises(LocalTierError, match="a process that came after process"):
            open_tier(ramdisk)
        monkeypatch.setattr(leftovers, "SETTLE_S", LONG_S)
        mine = record.replace('"start":"dead"', '"start":"this start"')
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(open_tier, ramdisk)
            (path / claims.OWNER_LOCK).write_text(mine)
            tier = opened.result(LONG_S)
    assert tier.path.name == "process_00000.1"
    tier.close()


def test_start_of_a_process_whose_name_is_cut_inside_a_letter(ramdisk: Path) -> None:
    """The kernel keeps the first 15 bytes of a name, which need not be UTF-8."""
    place = Path("/proc/self/comm")
    name = place.read_bytes()
    place.write_bytes("vierzehn Zeich\u00e9".encode())
    try:
        tier = open_tier(ramdisk)
        dir_fd = os.open(tier.path, os.O_RDONLY)
        owner = claims.read_owner(dir_fd)
        os.close(dir_fd)
        tier.close()
    finally:
        place.write_bytes(name)
    assert owner is not None
    assert owner.is_this_process


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid":"x"}', "\x00" * 5000])
def test_record_that_cannot_be_read_is_no_owner(tier: LocalTier, text: str) -> None:
    tier.close()
    (tier.path / claims.OWNER_LOCK).write_text(text)
    dir_fd = os.open(tier.path, os.O_RDONLY)
    assert claims.read_owner(dir_fd) is None
    os.close(dir_fd)
