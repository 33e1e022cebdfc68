"""A ramdisk names a life after which there is no other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from forgery import canonical, make_up_step, read, resealed, step_of, write
from world import World, save_all

from emergency_ckpt.core.limits import MAX_INCARNATION_NUMBER
from emergency_ckpt.errors import RestoreFailed


def directory(world: World) -> Path:
    return world.ramdisk / "run" / "process_00000"


def name_the_last_life(world: World) -> None:
    """Write a ledger, and a manifest and host states, of a life after which there is no other."""
    make_up_step(directory(world), 9)
    last = f"{MAX_INCARNATION_NUMBER}-5e5e5e5e5e5e5e5e"
    for manifest in directory(world).glob("slot_?.manifest.json"):
        if step_of(manifest) == 9:
            file = read(manifest)
            file["manifest"]["contents"]["save"]["incarnation"] = last
            write(manifest, resealed(file))
    complete = {"step": 9, "incarnation": last, "run_id": "run"}
    ledger = {"incarnation": last, "chain": None, "complete": complete}
    digest = hashlib.sha256(canonical(ledger)).hexdigest()
    write(directory(world) / "ledger.json", {"format": 1, "digest": digest, "ledger": ledger})


def test_last_number_of_a_life_is_named(world: World) -> None:
    with world.open() as ckpt:
        save_all(ckpt, world, 2, 4)
    name_the_last_life(world)
    with pytest.raises(RestoreFailed, match=r"no greater number.*eckpt ls"), world.open() as ckpt:
        ckpt.restore(state=world.state(0), host_state={"at": 0})
