"""A step from storage: each process reads its part into the memory that receives the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from ram_hosts import LEAF, SAVE, SECRET, SHAPE, VALUES, Host, at, hosts

from emergency_ckpt import _native
from emergency_ckpt.cluster.shard_source import ProcessHoldings, holder_name
from emergency_ckpt.core.boxes import shape_of
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.errors import NotHeld, PersistentTierError
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import CopiesFailed, ShardCollection
from emergency_ckpt.restore.storage_load import LoadPlan, StorageLoad, plan_load
from emergency_ckpt.storage.orbax_reader import StoredLeaf
from emergency_ckpt.storage.tier import StoredStep
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Box, ShardId
from emergency_ckpt.work_progress import WorkProgress

ROWS: list[Box] = [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 6), (0, 4))]


class Storage:
    """Storage with one array.

    Attributes:
      reads: the boxes that were read, by all processes.
      error: raised by the next read.
    """

    def __init__(self, chunk: tuple[int, int]) -> None:
        self.array = StoredArray("w", SHAPE, chunk, 4)
        self.reads: list[Box] = []
        self.error: Exception | None = None

    def read_into(
        self, item: str, arrays: Any, boxes: Sequence[tuple[ShardId, int]], sink: Any, **_: Any
    ) -> list[int]:
        crcs: list[int] = []
        for shard, offset in boxes:
            data = VALUES[at(shard.box)].tobytes()
            sink.write(memoryview(data), offset)
            self.reads.append(shard.box)
            crcs.append(_native.crc32c(data))
        error, self.error = self.error, None
        if error is not None:
            raise error
        return crcs


class Job:
    """A restore of a step in storage on several hosts, whose processes all need ``boxes``."""

    def __init__(self, found: list[Host], boxes: Sequence[Box], chunk: tuple[int, int]) -> None:
        self.hosts = found
        self.storage = Storage(chunk)
        self.targets = tuple(ShardId("w", box) for box in boxes)
        self.rooms = [RestoreRoom(host.tier, lack="") for host in found]
        self.gathered: dict[int, str | None] = {}  # by process

    @property
    def load_plan(self) -> LoadPlan:
        array = self.storage.array
        stored = StoredStep("item", None, {"w": StoredLeaf(LEAF, array)}, {}, SAVE.incarnation)
        chosen = RestorePlan(SAVE.step, None, {})
        every = dict.fromkeys(range(len(self.hosts)), self.targets)
        leaves = {"w": LEAF}
        return plan_load(chosen, stored, {"w": array}, every, leaves, "run", wants_host_state=False)

    def load(self, *processes: int) -> None:
        """Read the part of these processes, or of all."""
        storage: Any = self.storage
        for me in processes or range(len(self.hosts)):
            host = self.hosts[me]
            host.holdings.end_loaded()
            host.holdings.loaded = StorageLoad(
                host.tier,
                storage,
                self.load_plan,
                me=me,
                leaves=[LEAF],
                targets=self.targets,
                retained=None,
                progress=WorkProgress.until(time.monotonic() + 60),
                room=self.rooms[me],
            ).read()

    def plan(self) -> RestorePlan:
        inventories = tuple(host.holdings.inventory() for host in self.hosts)
        manifests = {
            held.digest: contents
            for host in self.hosts
            for held in host.holdings.inventory().tensors
            if (contents := host.holdings.contents(held.digest)) is not None
        }
        every = dict.fromkeys(range(len(self.hosts)), self.targets)
        plan = plan_restore(
            Inventory(inventories, manifests), every, {"w": LEAF}, needs_host_state=False
        )
        assert isinstance(plan, RestorePlan), plan
        return plan

    def restored(self, me: int, plan: RestorePlan | None = None) -> Mapping[Box, np.ndarray]:
        """Return the bytes of all targets at a process, as it has put them together."""
        plan, host = plan or self.plan(), self.hosts[me]
        sink = EventSink(None, process_index=me)
        with TransferClient(run_id="run", secret=SECRET) as client:
            shards = ShardCollection(
                host.tier,
                save=SAVE,
                me=holder_name(me),
                targets=self.targets,
                retained=None,
                calls=HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 60)),
                room=self.rooms[me],
                addresses=plan.addresses,
                loaded=host.holdings.loaded,
            )
            with shards.collecting(plan.copies[me]) as arrivals:
                for _ in arrivals:
                    pass
                self.gathered[me] = shards.gathered
                return {
                    box: shards.held.bytes_of(shard).view(np.int32).reshape(shape_of(box)).copy()
                    for shard in self.targets
                    for box in [shard.box]
                }

    def check(self, *processes: int) -> None:
        plan = self.plan()
        for me in processes or range(len(self.hosts)):
            for box, array in self.restored(me, plan).items():
                np.testing.assert_array_equal(array, VALUES[at(box)])


def names(host: Host, pattern: str) -> list[str]:
    return sorted(path.name for path in host.tier.path.glob(pattern))


CHUNKS = [pytest.param((2, 4), id="whole"), pytest.param((3, 4), id="cut")]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_slot_holds_what_is_read_and_what_is_fetched(chunk: tuple[int, int]) -> None:
    with hosts(3) as found:
        job = Job(found, ROWS, chunk)
        job.load()
        job.check()
        elements = sum(VALUES[at(box)].size for box in job.storage.reads)
        assert elements == VALUES.size, "each byte is read once over the job"
        for host in found:
            host.holdings.end_loaded()
            assert len(names(host, "slot_*.bin")) == 1
            (held,) = host.tier.held()[0]
            contents = host.tier.contents(held.digest)
            assert contents is not None
            assert sum(entry.nbytes for entry in contents.shards) == VALUES.nbytes
        job.check()  # from RAM alone


def test_part_is_served_before_anything_is_published() -> None:
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.load()
        loaded = found[0].holdings.loaded
        assert loaded is not None
        assert names(found[0], "*manifest*") == []
        assert found[0].tier.held()[0] == ()
        with TransferClient(run_id="run", secret=SECRET) as client:
            assert client.fetch_contents(found[0].server.address, loaded.digest) == loaded.encoded
        assert len(loaded.contents.shards) == 1, "half of the state is here"


def test_nothing_stays_of_a_restore_that_failed() -> None:
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.load()
        loaded = found[0].holdings.loaded
        assert loaded is not None
        found[0].holdings.end_loaded()
        assert names(found[0], "*manifest*") == []
        with TransferClient(run_id="run", secret=SECRET) as client, pytest.raises(NotHeld):
            client.fetch_contents(found[0].server.address, loaded.digest)
        found[0].publish(ROWS)
        assert len(names(found[0], "slot_*.bin")) == 1, "the slot is free"


def test_failed_fetch_leaves_the_part_to_the_peers() -> None:
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.load()
        plan = job.plan()
        found[1].holdings.end_loaded()
        with pytest.raises(CopiesFailed):
            job.restored(0, plan)
        assert names(found[0], "*manifest*") == []
        job.load(1)
        job.check(1, 0)
        assert len(names(found[0], "slot_*.bin")) == 1


def test_further_attempt_keeps_the_slot_with_all_shards() -> None:
    """Another process had failed: what is fetched again alone must not stand for the whole."""
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.load()
        plan = job.plan()
        for _ in range(2):
            for box, array in job.restored(0, plan).items():
                np.testing.assert_array_equal(array, VALUES[at(box)])
        digest = job.gathered[0]
        assert digest is not None
        found[0].tier.keep_only(SAVE, digest)
        (held,) = found[0].tier.held()[0]
        contents = found[0].tier.contents(held.digest)
        assert contents is not None
        assert {entry.box for entry in contents.shards} == set(ROWS[:2])


def test_read_that_breaks_off_goes_on_in_a_free_slot() -> None:
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.storage.error = unreachable = PersistentTierError("read", "w", "no answer")
        unreachable.retryable = unreachable.unreachable = True
        job.load()
        job.check()
        assert len(names(found[0], "slot_*.bin")) == 1


def test_memory_takes_the_place_of_a_slot_without_room() -> None:
    """Its peers fetch from it all the same, so each byte is read once."""
    with hosts(2) as found:
        job = Job(found, ROWS[:2], (2, 4))
        job.rooms[0].note_full("it is full")
        job.load()
        job.check()
        assert len(job.storage.reads) == 2
        assert names(found[0], "slot_*") == []
        assert [held.save for held in found[1].tier.held()[0]] == [SAVE]


def test_inventory_beside_the_end_of_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer asks while the training thread ends the restore."""
    with hosts(2) as found:
        Job(found, ROWS[:2], (2, 4)).load()
        holdings = found[0].holdings
        seen = iter([holdings.loaded, None])
        monkeypatch.setattr(
            ProcessHoldings, "loaded", property(lambda _: next(seen), print), raising=False
        )
        assert len(holdings.inventory().tensors) == 1
