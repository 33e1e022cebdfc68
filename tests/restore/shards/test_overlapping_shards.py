"""A save whose shards overlap, because it was brought into RAM on more than one mesh.

From the inventories of real tiers through the plan to the bytes, with a peer over TCP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from ram_hosts import LEAF, SAVE, SECRET, SHAPE, VALUES, Host, at, hosts

from emergency_ckpt.cluster.shard_source import holder_name
from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.plan_types import Copies, RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.errors import RestoreFailed
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import CopiesFailed, ShardCollection
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Box, Contents, ShardId
from emergency_ckpt.work_progress import WorkProgress

SPANS = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in SHAPE]
BOXES: list[Box] = list(product(*SPANS))


def grid(rows: int, columns: int) -> list[Box]:
    """The boxes of a mesh that cuts the leaf so many times along each axis."""
    cuts = [
        [(start, start + size // parts) for start in range(0, size, size // parts)]
        for size, parts in zip(SHAPE, (rows, columns), strict=True)
    ]
    return list(product(*cuts))


GRIDS = [grid(*parts) for parts in product((1, 2, 3, 6), (1, 2, 4))]


def restored(found: list[Host], targets: Sequence[Box]) -> dict[Box, np.ndarray] | None:
    """Return the bytes of each target at process 0; None without a plan."""
    inventories = tuple(host.holdings.inventory() for host in found)
    manifests: dict[str, Contents] = {}
    for host in found:
        for held in host.tier.held()[0]:
            contents = host.tier.contents(held.digest)
            assert contents is not None
            manifests[held.digest] = contents
    wanted = tuple(ShardId("w", box) for box in targets)
    plan = plan_restore(
        Inventory(inventories, manifests),
        dict.fromkeys(range(len(found)), wanted),
        {"w": LEAF},
        needs_host_state=False,
    )
    if not isinstance(plan, RestorePlan):
        return None
    return collected(found[0], plan.copies[0], wanted, plan.addresses)


def collected(
    host: Host,
    copies: Copies,
    wanted: Sequence[ShardId],
    addresses: Mapping[str, str],
    targets: Sequence[ShardId] | None = None,
    *,
    settles: bool = False,
) -> dict[Box, np.ndarray]:
    """Bring ``targets`` together, or all that is wanted; return the bytes of what is wanted.

    ``settles``: then keep only the slot that has all, if there is one.
    """
    with TransferClient(run_id="run", secret=SECRET) as client:
        sink = EventSink(None, process_index=0)
        shards = ShardCollection(
            host.tier,
            save=SAVE,
            me=holder_name(0),
            targets=tuple(wanted if targets is None else targets),
            retained=None,
            calls=HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 60)),
            room=RestoreRoom(host.tier, lack=""),
            addresses=addresses,
        )
        with shards.collecting(copies) as arrivals:
            for _ in arrivals:
                pass
            if settles and shards.gathered is not None:
                host.tier.keep_only(SAVE, shards.gathered)
            found = {shard.box: shards.held.bytes_of(shard).view(np.int32) for shard in wanted}
            return {box: data.reshape(shape_of(box)).copy() for box, data in found.items()}


@pytest.mark.dear
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_restore_of_overlapping_shards_is_exact(data: st.DataObject) -> None:
    """Whatever lies where: the bytes of each target are those of the leaf, or there is no plan."""
    random = st.lists(st.sampled_from(BOXES), max_size=6, unique=True)
    of_a_mesh = st.sampled_from(GRIDS).flatmap(
        lambda boxes: st.lists(st.sampled_from(boxes), max_size=len(boxes), unique=True)
    )
    slot = random | of_a_mesh | st.sampled_from(GRIDS)
    targets = data.draw(st.sampled_from(GRIDS))
    with hosts(2) as found:
        held: set[Box] = set()
        for host in found:
            for boxes in data.draw(st.lists(slot, min_size=1, max_size=3)):
                host.publish(boxes)
                held |= set(boxes)
        got = restored(found, targets)
        is_complete = np.zeros(SHAPE, bool)
        for box in held:
            is_complete[at(box)] = True
        event(f"whole: {is_complete.all()}")
        assert (got is not None) == bool(is_complete.all())
        for box, array in (got or {}).items():
            np.testing.assert_array_equal(array, VALUES[at(box)])


def test_shards_are_usable_after_all_was_gathered() -> None:
    """One of two slots is damaged: both go into a new one, also what was already at hand."""
    halves: list[Box] = [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    with hosts(2) as found:
        for host in found:
            for box in halves:
                host.publish([box])
        with open(found[0].tier.path / "slot_1.bin", "r+b") as file:
            file.write(b"\xff")
        got = restored(found, halves)
    assert got is not None
    for box, array in got.items():
        np.testing.assert_array_equal(array, VALUES[at(box)])


def test_damaged_own_shard_comes_from_another_manifest() -> None:
    """In the same attempt: the only peer that has it published it with other shards."""
    halves: list[Box] = [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    with hosts(2) as found:
        found[0].publish(halves)
        found[1].publish(halves[:1])
        with open(found[0].tier.path / "slot_0.bin", "r+b") as file:
            file.write(b"\xff")
        got = restored(found, halves)
    assert got is not None
    for box, array in got.items():
        np.testing.assert_array_equal(array, VALUES[at(box)])


@pytest.mark.parametrize("other", [0, 1, 2])
def test_old_slot_beside_one_with_all_shards_goes(other: int) -> None:
    """A crash left both: with the old one too, a small ramdisk has no room for another save."""
    rows: list[Box] = [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 6), (0, 4))]
    kept = [box for number, box in enumerate(rows) if number != other]
    with hosts(1) as (host,):
        host.publish([rows[other], kept[0]])
        host.publish(kept)
        wanted = tuple(ShardId("w", box) for box in kept)
        manifests = {held.digest: _contents(host, held.digest) for held in host.tier.held()[0]}
        plan = plan_restore(
            Inventory((host.holdings.inventory(),), manifests),
            {0: wanted},
            {"w": LEAF},
            needs_host_state=False,
        )
        assert isinstance(plan, RestorePlan)
        got = collected(host, plan.copies[0], wanted, plan.addresses, settles=True)
        (held,) = host.tier.held()[0]
        assert [entry.box for entry in _contents(host, held.digest).shards] == kept
    for box, array in got.items():
        np.testing.assert_array_equal(array, VALUES[at(box)])


def test_bytes_of_what_boxes_do_not_cover_is_refused() -> None:
    """As many elements as the target has, but some of them twice."""
    with hosts(1) as (host,):
        host.publish([((0, 6), (0, 3)), ((2, 4), (0, 3))])
        (held,) = host.tier.held()[0]
        targets = (ShardId("w", ((0, 6), (0, 3))), ShardId("w", ((2, 4), (0, 3))))
        plan = plan_restore(
            Inventory((host.holdings.inventory(),), {held.digest: _contents(host, held.digest)}),
            {0: targets},
            {"w": LEAF},
            needs_host_state=False,
        )
        assert isinstance(plan, RestorePlan)
        wanted = [ShardId("w", ((0, 6), (0, 4)))]
        with pytest.raises(RestoreFailed, match=r"\[0:6, 3:4\] is held nowhere \(6 elements\)"):
            collected(host, plan.copies[0], wanted, plan.addresses, targets)


def _contents(host: Host, digest: str) -> Contents:
    contents = host.tier.contents(digest)
    assert contents is not None
    return contents


def test_own_copy_changed_after_its_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied into the new slot is compared again, since the file may change meanwhile."""
    halves: list[Box] = [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    with hosts(2) as found:
        for host in found:
            for box in halves:
                host.publish([box])
        with open(found[0].tier.path / "slot_1.bin", "r+b") as file:
            file.write(b"\xff")
        verify = LocalTier.verify

        def verify_then_change(tier: LocalTier, *args: Any) -> list[tuple[int, int]]:
            bad = verify(tier, *args)
            with open(tier.path / "slot_0.bin", "r+b") as file:
                file.write(b"\xff")
            return bad

        monkeypatch.setattr(LocalTier, "verify", verify_then_change)
        with pytest.raises(CopiesFailed):
            restored(found, halves)
