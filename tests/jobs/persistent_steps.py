"""Whole steps in a directory or bucket, as saves leave them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from state_samples import on_host

from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.core.timeline import Timeline, number_of
from emergency_ckpt.state import BoxTable, describe, host_state
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage.array_writes import DATA_FILE_BYTES
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.storage.log import KEPT, LOG_FOLDER
from emergency_ckpt.storage.marker import OURS
from emergency_ckpt.storage.meetings import BEGUN, WRITTEN, Meet, meet_nobody
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE
from emergency_ckpt.types import LeafSpec, SaveId

__all__ = ["DATA_FILE_BYTES", "INSPECTED_AT_ONCE", "KEPT", "LOG_FOLDER"]

RUN_ID = "run"


def life(number: int, nonce: str = "a") -> str:
    """The incarnation of this number; with another ``nonce``, that of one that knew not of it."""
    return f"{number:012d}-{nonce * 16}"


def writer_of(tier: PersistentTier, run_id: str = RUN_ID, **settings: Any) -> DirectoryWriter:
    """A writer of the tier's directory, as each start of a job has one of its own."""
    return DirectoryWriter(tier.storage, tier.found, run_id=run_id, from_dir=False, **settings)


def fill(
    directory: str,
    steps: Iterable[int],
    *,
    metrics: Callable[[int], Any] | None = None,
    incarnation: str = life(1),
) -> PersistentTier:
    """A tier with ``steps``, which plain Orbax reads too: ``w`` is the step, four times."""
    tier = PersistentTier(directory)
    tier.create()
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave({"w": np.full(4, step)})),
                custom_metadata={OURS: {"run_id": RUN_ID, "incarnation": incarnation}},
            )
    writer = writer_of(tier)
    writer.hold(incarnation)
    for step in steps:
        tier.write_document(step, 0, 1, b"{}")
        entry = tier.finish(
            SaveId(step, incarnation, RUN_ID),
            {0: ("0" * 64, True)},
            [LeafSpec("w", "int64", (4,))],
            {},
            None if metrics is None else metrics(step),
        )
        writer.publish(entry, None)
    return tier


def save_over(
    tier: PersistentTier,
    step: int,
    value: int,
    incarnation: str,
    *,
    chain: Timeline | None = None,
    writer: DirectoryWriter | None = None,
    at: Callable[[str], None] = lambda _: None,
) -> None:
    """One save, as ``save.persistent.save`` does it where it keeps nothing that lies there.

    ``writer``: of a life that has saved before; else this is the first save of its life.
    ``at``: called at each of ``POINTS``.
    """
    tier.create()
    writer = writer or writer_of(tier)
    writer.begin(incarnation)
    at("claimed")
    writer.make_room(step, chain)
    at("room")
    entry = write(tier, step, value, incarnation, writer.check, at)
    at("marked")
    writer.publish(entry, chain)
    at("published")
    writer.settle()


POINTS = (
    "claimed",
    "room",
    "documents",
    "begun",
    "written",
    "checked",
    "committed",
    "marked",
    "published",
)
"""Of ``save_over``: after a version names the life; after the step's place is clear; after the host
states; after the folder of the tensors; after these; after the last look at the log; after Orbax's
commit; after the marker; after the version that lists the step."""


def write(
    tier: PersistentTier,
    step: int,
    value: int,
    incarnation: str,
    before_commit: Callable[[], None] = lambda: None,
    at: Callable[[str], None] = lambda _: None,
) -> Entry:
    """The files of a save, with both markers; what makes it count."""
    assert number_of(incarnation), "as ``life`` makes one"
    save = SaveId(step, incarnation, RUN_ID)
    data = host_state.encode(save, 0, 1, host_state.capture({"at": value}))

    def meet(name: str) -> None:
        if name == BEGUN:
            at("begun")
        if name == WRITTEN:
            at("written")
            before_commit()
            at("checked")

    tier.write_document(step, 0, 1, data)
    at("documents")
    specs = write_tensors(tier, save, value, meet)
    at("committed")
    digest = hashlib.sha256(data).hexdigest()
    return tier.finish(save, {0: (digest, False)}, specs, {})


def write_tensors(
    tier: PersistentTier, save: SaveId, value: int, meet: Meet = meet_nobody
) -> list[LeafSpec]:
    """The tensors alone of a save: ``w`` is ``value``, four times."""
    state = {"w": np.full(4, value)}
    tree, shards = on_host(state)
    tier.write_tensors(save, tree, shards, (0,), meet)
    return [leaf.spec for leaf in tree.leaves]


def value_of(tier: PersistentTier, step: int) -> int:
    """What ``save_over`` stored, read as a restore does; of plain Orbax, what lies in ``w``."""
    return value_in(tier, tier.find(step))


def value_in(tier: PersistentTier, found: FoundStep) -> int:
    """As ``value_of``, of a step that was found."""
    stored = tier.describe(found)
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    tree = describe({"w": np.zeros(4, np.int64)}, "restore")
    shards = BoxTable(tree, 1).shards_of(0)
    ((_, array),) = tier.read_boxes(
        stored.item, arrays, shards, complete=True, deadline_s=time.monotonic() + 60
    )
    (value,) = set(np.asarray(array).reshape(-1).tolist())
    if stored.marker is not None:
        digest = stored.marker.digests[0]
        data = tier.read_document(stored.marker.save.step, 0, 1, digest)
        assert host_state.value_of(host_state.decode(data).payload) == {"at": value}
    return value


def complete_steps(tier: PersistentTier | str) -> list[int]:
    """The steps that count, oldest first."""
    tier = PersistentTier(tier) if isinstance(tier, str) else tier
    return [each.step for each in tier.found.counting()]
