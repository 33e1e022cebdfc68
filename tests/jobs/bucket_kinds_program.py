"""The first calls to buckets of several kinds, and a life in each; prints what came of them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# ruff: noqa: E402 - these import what the lines above must precede

import fsspec
import storage_control
from persistent_steps import complete_steps
from world import STORAGE, World, logged, save_all

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier

KINDS = ("zonal", "hierarchical", "bucket")


def error_of(work: Any) -> str:
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def life(folder: Path, url: str, *steps: int) -> str:
    def train() -> None:
        world = World(folder)
        settings = {**STORAGE, "dir": url, "keep_last_n": 1}
        with world.open(**settings) as ckpt:
            save_all(ckpt, world, *steps)
            ckpt.check_for_errors()

    return error_of(train)


def next_life(folder: Path, url: str) -> dict[str, Any]:
    """A life that has storage alone: what it restores, passes over, and leaves."""
    world = World(folder)
    settings = {**STORAGE, "dir": url, "keep_last_n": 1}
    with logged() as lines, world.open(**settings) as ckpt:
        step, _ = ckpt.restore(state=world.state(0))
        seen = {"step": step, "all": ckpt.all_steps()}
        save_all(ckpt, world, 6)
    passed = [each.fields["step"] for each in world.events if each.name == "restore.rejected"]
    unusable = [line for line in lines if "cannot be used" in line]
    return {**seen, "passed over": passed, "unusable": unusable}


def main() -> None:
    storage_control.install(os.environ["STORAGE_EMULATOR_HOST"])
    # As with a user, its client finds out the kind of each bucket by itself.
    assert type(fsspec.filesystem("gs")) is storage_control.ExtendedGcsFileSystem
    found: dict[str, Any] = {}
    for kind in KINDS:
        url = f"gs://{kind}/run"
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eckpt-test-") as folder:
            told = error_of(lambda: PersistentTier(url).create())  # noqa: B023
            looked = error_of(lambda: complete_steps(PersistentTier(url)))  # noqa: B023
            lived = life(Path(folder), url, 2, 4)
            found[kind] = {"create": told, "list": looked, "life": lived}
        if not told:
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eckpt-test-") as folder:
                found[kind] |= next_life(Path(folder), url)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
