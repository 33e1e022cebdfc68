"""Places of tiers for ``tier_cases``; as a program, the cases in a bucket, with a line of JSON."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from damage import flip
from etils import epath
from memory_tier import MemoryTier
from persistent_steps import RUN_ID, writer_of
from tier_cases import CASES
from tiers_support import publish

from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.ram.process_files import file_name
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.tier import StepReader
from emergency_ckpt.types import ShardId, Writer

_SLOTS = 4


class RamPlace:
    """A ramdisk, of which each life has the same process directory."""

    def __init__(self, ramdisk: Path) -> None:
        self._ramdisk = ramdisk
        self._tier: LocalTier | None = None

    def tier(self) -> LocalTier:
        self.close()
        writer = Writer(process_index=0, process_count=3, slice_index=0, hostname="host")
        self._tier = LocalTier(self._ramdisk, RUN_ID, writer, copy_threads=1, slots=_SLOTS)
        return self._tier

    def publish(
        self, tier: LocalTier, step: StepReader, life: str, chain: Timeline | None = None
    ) -> None:
        """As ``LocalSaves`` of a job of one process; a vote has nobody to ask."""
        save, documents = step.save, step.host_states()
        boxes = [(path, box) for path in step.leaves for box in step.boxes(path)]
        shards = {ShardId(path, box): step.read(path, box) for path, box in boxes}
        publish(tier, save, list(step.leaves.values()), shards)
        for owner, data in documents.items():
            tier.publish_host_state(save, owner, len(documents), data)
        tier.note_incarnation(life)
        if chain is not None:
            tier.follow(chain)
        tier.note_complete(save)

    def damage(self, step: int) -> None:
        tier = self.tier()
        (held,) = [held for held in tier.held()[0] if held.save.step == step]
        contents = tier.contents(held.digest)
        assert contents is not None
        largest = max(contents.shards, key=lambda entry: entry.nbytes)
        paths = [tier.path / file_name(number) for number in range(_SLOTS)]
        for path in (path for path in paths if path.exists()):
            flip(path, largest.offset)

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()


class StoragePlace:
    """A directory or URL."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def tier(self) -> PersistentTier:
        tier = PersistentTier(self._directory, timeout_s=60.0)
        tier.create()
        tier.writer = writer_of(tier)
        return tier

    def publish(
        self, tier: PersistentTier, step: StepReader, life: str, chain: Timeline | None = None
    ) -> None:
        tier.publish(step, life, chain)

    def damage(self, step: int) -> None:
        folder = epath.Path(self._directory) / str(step)
        patterns = ("state/d/*", "state/*/d/*")
        files = [path for each in patterns for path in folder.glob(each) if path.is_file()]
        path = max(files, key=lambda each: len(each.read_bytes()))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    def close(self) -> None:
        pass


class MemoryPlace:
    """A tier that is its own place."""

    def __init__(self) -> None:
        self._tier = MemoryTier()

    def tier(self) -> MemoryTier:
        return self._tier

    def publish(
        self, tier: MemoryTier, step: StepReader, life: str, chain: Timeline | None = None
    ) -> None:
        del life
        tier.publish(step, chain)

    def damage(self, step: int) -> None:
        self._tier.open_step(step).damage()

    def close(self) -> None:
        pass


def main() -> None:
    found: dict[str, str] = {}
    for case in CASES:
        try:
            case(StoragePlace(f"gs://bucket/{case.__name__}"))
        except BaseException:  # noqa: BLE001 - the test shows it
            found[case.__name__] = traceback.format_exc()
        else:
            found[case.__name__] = ""
    print(json.dumps(found))


if __name__ == "__main__":
    main()
