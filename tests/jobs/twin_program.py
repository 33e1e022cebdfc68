"""One life of a run of one process; two of them save one step at once. See its test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from buffered import with_buffers

from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.storage.item.array_writes import ArrayWrites

LEAVES, ROWS = 4, 256
BATCH_BYTES = ROWS * 1024 * 4
RUN_ID = "run"


def state_of(step: int, life: int) -> dict[str, Any]:
    """Return leaves of one batch each; every element names the save."""
    return {f"leaf{i}": np.full((ROWS, 1024), 100 * life + step, np.float32) for i in range(LEAVES)}


def say(text: str) -> None:
    print(text, flush=True)


def hold(name: str) -> None:
    """Stop here until the test says otherwise."""
    say(f"held {name}")
    sys.stdin.readline()


def hold_in_step(point: str) -> None:
    """Arrange that the save of the next step stops once, at ``point`` of the write of its arrays.

    ``data``: some arrays are written. ``merge``: all are, and are merged next.
    """
    name = {"data": "_write_batch", "merge": "check"}[point]
    work, holds = getattr(ArrayWrites, name), [point]

    def held(own: ArrayWrites, *args: Any) -> Any:
        result = work(own, *args)
        while holds:
            hold(holds.pop())
        return result

    setattr(ArrayWrites, name, held)


def main(directory: str, local_dir: str, life: int, point: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    with with_buffers(Buffers(storage_bytes=BATCH_BYTES))(
        dir=directory,
        local_dir=local_dir,
        run_id=RUN_ID,
        local_save_every=1,
        save_every=2,
    ) as ckpt:
        found, _ = ckpt.restore(state=state_of(0, 0))
        say(f"restored {found}")
        for step in (2, 4):
            if step <= (found or 0):
                continue
            if step == 4:
                hold_in_step(point)
            ckpt.save(step=step, state=state_of(step, life))
            ckpt.wait_until_finished()
        say(f"failed {ckpt.failed_saves}")
    Path(local_dir, "ended").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
