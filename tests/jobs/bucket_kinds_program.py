"""The first calls to buckets of several kinds, and a life in each; prints what came of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# ruff: noqa: E402 - these import what the lines above must precede

from persistent_steps import complete_steps
from world import STORAGE, World, save_all

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


def main() -> None:
    found: dict[str, Any] = {}
    for kind in KINDS:
        url = f"gs://{kind}/run"
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eckpt-test-") as folder:
            told = error_of(lambda: PersistentTier(url).create())  # noqa: B023
            looked = error_of(lambda: complete_steps(PersistentTier(url)))  # noqa: B023
            lived = life(Path(folder), url, 2, 4)
            steps = [] if told else complete_steps(PersistentTier(url))
        found[kind] = {"create": told, "list": looked, "life": lived, "steps": steps}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
