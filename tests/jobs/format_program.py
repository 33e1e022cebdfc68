"""Prints what the product and the reader of FORMAT.md find in directories of a bucket."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import orbax.checkpoint as ocp
from fake_gcs import GcsControl
from persistent_steps import RUN_ID, fill, life, save_over, writer_of

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId

sys.path.append(str(Path(__file__).parents[2] / "verification"))
from format_reader import read_storage

ROLLED_BACK = continued(None, SaveId(10, life(1), RUN_ID), life(2))


class BucketFiles:
    """The objects below a prefix."""

    def __init__(self, prefix: str) -> None:
        self._control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
        self._prefix = f"{prefix}/"

    def names(self) -> list[str]:
        found = self._control.object_names("bucket", self._prefix)
        return [name.removeprefix(self._prefix) for name in found]

    def read(self, name: str) -> bytes:
        return self._control.object_bytes("bucket", self._prefix + name)


def saved(tier: PersistentTier) -> None:
    """The steps 10 and 20 of ``fill``, and one with a host state."""
    save_over(tier, 30, 30, life(2))


def removed(tier: PersistentTier) -> None:
    writer_of(tier).remove([20], life(1))


def rolled_back(tier: PersistentTier) -> None:
    writer_of(tier).begin(life(2), ROLLED_BACK)


def log_lost_after_rollback(tier: PersistentTier) -> None:
    rolled_back(tier)
    (tier.storage.path / "host_state/log").rmtree()


def saved_again_after_rollback(tier: PersistentTier) -> None:
    rolled_back(tier)
    save_over(tier, 20, 21, life(2))


def killed_in_a_save_over_a_hidden_one(tier: PersistentTier) -> None:
    rolled_back(tier)
    writer = writer_of(tier)
    writer.begin(life(2))
    writer.make_room(20)


def plain_orbax_beside(tier: PersistentTier) -> None:
    with ocp.CheckpointManager(tier.directory) as manager:
        manager.save(25, args=ocp.args.StandardSave({"w": 25}))


def adopted(tier: PersistentTier) -> None:
    plain_orbax_beside(tier)
    writer_of(tier).adopt()


MADE: list[Callable[[PersistentTier], None]] = [
    saved,
    removed,
    rolled_back,
    log_lost_after_rollback,
    saved_again_after_rollback,
    killed_in_a_save_over_a_hidden_one,
    plain_orbax_beside,
    adopted,
]


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    for make in MADE:
        name = make.__name__
        make(fill(f"gs://bucket/{name}", [10, 20]))
        tier = PersistentTier(f"gs://bucket/{name}")
        read = read_storage(BucketFiles(name), is_bucket=True)
        found[name] = {
            "product": [[each.step, each.incarnation] for each in tier.found.counting()],
            "reader": [[each.step, each.incarnation] for each in read.counting],
            "states": [[each.step, each.state, each.tensors] for each in read.steps],
            "refusal": read.refusal,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
