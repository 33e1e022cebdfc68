"""What a process says when its part of a plan cannot be had."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import pytest
from fake_link import FakeMachine
from memory_holdings import MemoryHoldings
from world import small_tmpfs

from emergency_ckpt.core.restore.inventory import Quarantined
from emergency_ckpt.core.restore.plan_types import Bundle, Copies, ManifestHolders, OwnManifest
from emergency_ckpt.errors import HolderUnreachable
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.shards import CopiesFailed, ShardCollection
from emergency_ckpt.state import host_state
from emergency_ckpt.state.mapped import Mapper
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import SaveId, ShardId, Writer
from emergency_ckpt.work_progress import WorkProgress

SECRET = b"s" * 40
SAVE = SaveId(5, "000000000002-life", "run")


def _use_what_comes(shards: ShardCollection, copies: Copies) -> None:
    with shards.collecting(copies) as arrivals:
        for arrived in arrivals:
            shards.held.bytes_of(arrived[0])


def _tier(ramdisk: Path, mapper: Mapper | None = None) -> LocalTier:
    writer = Writer(process_index=0, process_count=1, slice_index=0, hostname="h")
    return LocalTier(ramdisk, "run", writer, copy_threads=1, mapper=mapper)


@contextlib.contextmanager
def _fetching(
    tier: LocalTier, holdings: MemoryHoldings, digest: str
) -> Iterator[tuple[ShardCollection, Copies]]:
    """Serve ``holdings``; yield a collection of ``digest`` into ``tier``, and where it is held."""
    sink = EventSink(None, process_index=0)
    with (
        TransferServer(holdings, run_id="run", secret=SECRET) as server,
        TransferClient(run_id="run", secret=SECRET) as client,
    ):
        shards = ShardCollection(
            tier,
            save=SAVE,
            me="process/0",
            targets=_targets(holdings, digest),
            retained=None,
            calls=HolderCalls(client, sink, WorkProgress.until(time.monotonic() + 30)),
            room=RestoreRoom(tier, lack=""),
            addresses={"server": server.address},
        )
        yield shards, _held_by(digest, "server")


def _held_by(digest: str, *holders: str) -> Copies:
    return Copies((Bundle(None, (), (ManifestHolders(digest, holders),)),))


def _targets(holdings: MemoryHoldings, digest: str) -> tuple[ShardId, ...]:
    with holdings.mapping_for(digest) as (_, contents):
        return tuple(contents.shard_id(index) for index in range(len(contents.shards)))


def _slot_of_an_earlier_life(ramdisk: Path, size_bytes: int) -> Path:
    """A slot that no manifest names."""
    directory = ramdisk / "run" / "process_00000"
    directory.parent.mkdir(mode=0o700)
    directory.mkdir(mode=0o700)
    slot = directory / "slot_0.bin"
    slot.write_bytes(bytes(size_bytes))
    return slot


def _fetched(ramdisk: Path, holdings: MemoryHoldings, digest: str) -> LocalTier:
    """A tier that has fetched all of ``digest`` into a slot; to be closed."""
    tier = _tier(ramdisk)
    tier.map_newest_in_background()
    with (
        _fetching(tier, holdings, digest) as (shards, copies),
        shards.collecting(copies) as arrivals,
    ):
        assert sum(len(arrived) for arrived in arrivals) == 8
    return tier


@pytest.mark.parametrize("made_bytes", [1 << 20, 6 << 20, 8 << 20, 40 << 20])
def test_fetched_bytes_go_into_the_slot_of_an_earlier_life(ramdisk: Path, made_bytes: int) -> None:
    """It was made for less than comes, for just that, or for more."""
    holdings = MemoryHoldings()
    data = [bytes([number]) * (1 << 20) for number in range(8)]
    digest = holdings.add(SAVE, data)
    slot = _slot_of_an_earlier_life(ramdisk, made_bytes)
    before = slot.stat()
    tier = _fetched(ramdisk, holdings, digest)
    assert tier.verify(digest, range(8)) == []
    with tier.reading(digest) as view:
        assert [view(shard).tobytes() for shard in range(8)] == data
    after = slot.stat()
    assert after.st_ino == before.st_ino
    assert after.st_blocks * 512 == max(made_bytes, 8 << 20), "no holes, and no room beyond it"
    assert list(tier.path.glob("slot_?.bin")) == [slot]
    tier.close()


def test_fetched_bytes_are_used_from_mapped_memory(ramdisk: Path) -> None:
    """A slice that lost its ramdisk: the slot is made while the mapper is slow."""
    holdings, machine = MemoryHoldings(), FakeMachine()
    digest = holdings.add(SAVE, [bytes([number]) * (1 << 20) for number in range(8)])
    machine.map_gate.clear()
    tier = _tier(ramdisk, machine)
    with (
        _fetching(tier, holdings, digest) as (shards, copies),
        shards.collecting(copies) as arrivals,
        ThreadPoolExecutor(1) as pool,
    ):
        first = next(iter(arrivals))[0]
        is_mapped = pool.submit(lambda: machine.has_mapped(shards.held.bytes_of(first)))
        waiting = wait([is_mapped], 0.2).not_done
        machine.map_gate.set()
        assert waiting
        assert is_mapped.result(60)
    tier.close()


def test_slot_that_somebody_removes_is_used_to_the_end(ramdisk: Path) -> None:
    """A document of a peer, which comes meanwhile, finds that the file is gone."""
    holdings, data = MemoryHoldings(), [bytes([number]) * (1 << 20) for number in range(8)]
    digest = holdings.add(SAVE, data)
    tier = _tier(ramdisk)
    with (
        _fetching(tier, holdings, digest) as (shards, copies),
        shards.collecting(copies) as arrivals,
    ):
        came = sorted(shard for arrived in arrivals for shard in arrived)
        (slot,) = tier.path.glob("slot_?.bin")
        slot.unlink()
        document = host_state.encode(SAVE, 0, 1, host_state.capture(17))
        tier.publish_host_state(SAVE, 0, 1, document)
        assert [shards.held.bytes_of(shard).tobytes() for shard in came] == data
    tier.close()


def test_fetched_bytes_without_room_go_into_memory(ramdisk: Path) -> None:
    """They can be used, and the ramdisk has none of them."""
    holdings = MemoryHoldings()
    data = [bytes([number]) * (1 << 20) for number in range(8)]
    digest = holdings.add(SAVE, data)
    with small_tmpfs(ramdisk / "small", 2 << 20):
        tier = _tier(ramdisk / "small")
        with _fetching(tier, holdings, digest) as (shards, copies):
            found: dict[ShardId, bytes] = {}
            with shards.collecting(copies) as arrivals:
                for shard in (each for arrived in arrivals for each in arrived):
                    found[shard] = shards.held.bytes_of(shard).tobytes()
            assert sorted(found.values()) == data
            assert shards.gathered is None
        assert tier.held()[0] == ()
        assert not list(tier.path.glob("slot_?.bin"))
        tier.close()


class _BreakingLine:
    """Breaks each connection that has carried so many bytes of bodies since the last break."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._sent_bytes = limit_bytes, 0
        self.breaks = 0

    def __call__(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
        if self._sent_bytes >= self._limit_bytes:
            self._sent_bytes = 0
            self.breaks += 1
            raise ConnectionResetError("the line broke")


def _fetch_from(
    addresses: dict[str, str],
    tier: LocalTier,
    holdings: MemoryHoldings,
    digest: str,
    deadline_s: float,
    copies: Copies | None = None,
) -> list[Event]:
    """Fetch the shards of ``digest``. ``copies``: None where each of ``addresses`` has that."""
    events: list[Event] = []
    sink = EventSink(events.append, process_index=0)
    with TransferClient(
        run_id="run", secret=SECRET, streams=1, connect_timeout_s=1, io_timeout_s=3
    ) as client:
        shards = ShardCollection(
            tier,
            save=SAVE,
            me="process/0",
            targets=_targets(holdings, digest),
            retained=None,
            calls=HolderCalls(client, sink, WorkProgress.until(time.monotonic() + deadline_s)),
            room=RestoreRoom(tier, lack=""),
            addresses=addresses,
        )
        with shards.collecting(copies or _held_by(digest, *addresses)) as arrivals:
            assert sum(len(arrived) for arrived in arrivals) == 8
    return events


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("loses", ["at once", "after the manifest"])
def test_another_manifest_serves_for_a_silent_holder(ramdisk: Path, loses: str, place: int) -> None:
    """Striped placement gives holders other shards, so no two have the same manifest."""
    data = [bytes([number]) * (4 << 20) for number in range(8)]
    near, far = MemoryHoldings(), MemoryHoldings()
    digest, other = near.add(SAVE, data), far.add(SAVE, [*data, b"and more"])
    sources = (ManifestHolders(digest, ("near",)), ManifestHolders(other, ("far",)))
    lines = [_BreakingLine(1 if number == place else 1 << 30) for number in (0, 1)]
    tier = _tier(ramdisk)
    with (
        TransferServer(near, run_id="run", secret=SECRET, on_bytes_sent=lines[0]) as first,
        TransferServer(far, run_id="run", secret=SECRET, on_bytes_sent=lines[1]) as second,
    ):
        if loses == "at once":
            (first, second)[place].stop()
        addresses = {"near": first.address, "far": second.address}
        copies = Copies((Bundle(None, (), sources),), place=place)
        _fetch_from(addresses, tier, near, digest, 10, copies)
    (copy,) = tier.held()[0]
    assert tier.verify(copy.digest, range(8)) == []
    with tier.reading(copy.digest) as view:
        assert [view(shard).tobytes() for shard in range(8)] == data
    tier.close()


def test_two_manifests_serve_for_a_silent_holder(ramdisk: Path) -> None:
    """Each has other bytes under the names of the rest, which is no damage."""
    data = [bytes([number]) * (4 << 20) for number in range(8)]
    near, left, right = (MemoryHoldings() for _ in range(3))
    digest = near.add(SAVE, data)
    others = [bytes([99]) * (4 << 20)] * 4
    lefts, rights = left.add(SAVE, data[:4] + others), right.add(SAVE, others + data[4:])
    bundles = tuple(
        Bundle(
            tuple(range(first, first + 4)),
            (),
            (ManifestHolders(digest, ("near",)), ManifestHolders(other, (name,))),
        )
        for first, other, name in ((0, lefts, "left"), (4, rights, "right"))
    )
    tier = _tier(ramdisk)
    with (
        TransferServer(near, run_id="run", secret=SECRET, on_bytes_sent=_BreakingLine(1)) as silent,
        TransferServer(left, run_id="run", secret=SECRET) as first,
        TransferServer(right, run_id="run", secret=SECRET) as second,
    ):
        addresses = {"near": silent.address, "left": first.address, "right": second.address}
        events = _fetch_from(addresses, tier, near, digest, 10, Copies(bundles))
    assert {event.name for event in events} == {"restore.peer_unreachable"}
    (copy,) = tier.held()[0]
    with tier.reading(copy.digest) as view:
        assert [view(shard).tobytes() for shard in range(8)] == data
    tier.close()


def test_peer_lost_in_the_middle_leaves_the_rest_to_another(ramdisk: Path) -> None:
    """Half of a request has come."""
    holdings = MemoryHoldings()
    data = [bytes([number]) * (4 << 20) for number in range(8)]
    digest = holdings.add(SAVE, data)
    _slot_of_an_earlier_life(ramdisk, 10 << 20)
    tier = _tier(ramdisk)
    tier.map_newest_in_background()
    line = _BreakingLine(12 << 20)
    with (
        TransferServer(holdings, run_id="run", secret=SECRET, on_bytes_sent=line) as breaking,
        TransferServer(holdings, run_id="run", secret=SECRET) as sound,
    ):
        addresses = {"breaking": breaking.address, "sound": sound.address}
        _fetch_from(addresses, tier, holdings, digest, 60)
    assert line.breaks
    assert tier.verify(digest, range(8)) == []
    with tier.reading(digest) as view:
        assert [view(shard).tobytes() for shard in range(8)] == data
    tier.close()


def test_slot_of_a_fetch_without_end_holds_nothing(ramdisk: Path) -> None:
    """The only holder breaks each connection; what came so far must not count, now or later."""
    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [bytes([number]) * (4 << 20) for number in range(8)])
    _slot_of_an_earlier_life(ramdisk, 10 << 20)
    tier = _tier(ramdisk)
    with (
        TransferServer(
            holdings, run_id="run", secret=SECRET, on_bytes_sent=_BreakingLine(1)
        ) as server,
        pytest.raises(HolderUnreachable),
    ):
        _fetch_from({"breaking": server.address}, tier, holdings, digest, 1)
    assert tier.held()[0] == ()
    tier.close()
    again = _tier(ramdisk)
    assert again.held()[0] == ()
    again.close()
    again = _fetched(ramdisk, holdings, digest)
    assert again.verify(digest, range(8)) == []
    assert [path.name for path in again.path.glob("slot_?.bin")] == ["slot_0.bin"]
    again.close()


def test_failed_copy_is_named_also_by_users_of_what_had_come(tmp_path: Path) -> None:
    """Else the leader takes it for a fault that no other plan can mend."""
    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [bytes([number]) * 4096 for number in range(8)])
    holdings.corrupt(digest, 7)
    tier = _tier(tmp_path)
    try:
        with _fetching(tier, holdings, digest) as (shards, copies):
            with pytest.raises(CopiesFailed) as failed:
                _use_what_comes(shards, copies)
            assert [(copy.holder, copy.shard) for copy in failed.value.unusable] == [("server", 7)]
    finally:
        tier.close()


def test_own_shard_that_changes_on_its_way_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new CRC32C would fit the altered bytes, so that nobody would ever learn of it."""
    holdings = MemoryHoldings()
    digest = holdings.add(SAVE, [bytes([number]) * 4096 for number in range(8)])
    tier = _fetched(tmp_path, holdings, digest)
    (slot,) = tier.path.glob("slot_?.manifest.json")
    contents = tier.contents(digest)
    assert contents is not None
    verify = tier.verify

    def verify_and_flip(of: str, shards: Sequence[int]) -> list[tuple[int, int]]:
        found = verify(of, shards)
        with (tier.path / slot.name.replace(".manifest.json", ".bin")).open("r+b") as file:
            file.seek(contents.shards[3].offset)
            file.write(b"x")
        return found

    monkeypatch.setattr(tier, "verify", verify_and_flip)
    try:
        with _fetching(tier, holdings, digest) as (shards, copies):
            both = msgspec.structs.replace(copies, own=(OwnManifest(digest, (7,)),))
            with pytest.raises(CopiesFailed) as failed, shards.collecting(both) as arrivals:
                list(arrivals)
            assert [(copy.holder, copy.shard) for copy in failed.value.unusable] == [
                ("process/0", 3)
            ]
        assert list(tier.path.glob("slot_?.manifest.json")) == [slot]
    finally:
        tier.close()


@pytest.mark.parametrize("lie", ["fewer shards", "another save"])
def test_manifest_that_is_not_what_its_holder_reported_is_left(ramdisk: Path, lie: str) -> None:
    """The leader believed the report, and read no manifest."""
    holdings = MemoryHoldings()
    data = [bytes([number]) * 4096 for number in range(8)]
    digest = holdings.add(SAVE, data)
    if lie == "fewer shards":
        other = holdings.add(SAVE, data[:4])
    else:
        other = holdings.add(SaveId(6, SAVE.incarnation, "run"), data)
    tier = _tier(ramdisk)
    with _fetching(tier, holdings, digest) as (shards, _):
        with pytest.raises(CopiesFailed) as failure:
            _use_what_comes(shards, _held_by(other, "server"))
        assert failure.value.unusable == (Quarantined("server", other),)
    tier.close()
