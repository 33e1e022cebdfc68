"""The check of everything that places have: small files, and on request every byte."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from emergency_ckpt import _native
from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.divergence import divergences
from emergency_ckpt.errors import CheckpointError, CorruptData
from emergency_ckpt.ram.process_files import ProcessFiles, file_name, manifest_name
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.storage.steps.folders import INSPECTED_AT_ONCE
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.tools.survey.places import Places, SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import RamCopy
from emergency_ckpt.tools.survey.survey import Survey
from emergency_ckpt.types import LOCAL, PERSISTENT, ShardEntry

_PIECE_BYTES = 8 << 20
Advance = Callable[[int], None]


class CheckCounts(msgspec.Struct):
    """The numbers of what was compared.

    Attributes:
      manifests: published slots, and markers in storage.
      host_states: documents whose digest was compared.
      shards, bytes: whose CRC32C was compared, in both tiers; boxes without one are read only.
      gone: slots that a job saved over meanwhile; they are not damaged.
    """

    manifests: int = 0
    host_states: int = 0
    shards: int = 0
    bytes: int = 0
    gone: int = 0


class Check:
    """One check of a survey. Each part yields the faults that it finds, and counts. Blocks.

    Attributes:
      found: the sound steps in storage, by number and incarnation.
    """

    def __init__(self, survey: Survey, places: Places) -> None:
        self.counts = CheckCounts()
        self.found: dict[tuple[int, str], FoundStep] = {}
        self._survey = survey
        self._places = places
        self._copies = [copy for folder in survey.folders for copy in folder.copies]

    def small_files(self) -> Iterator[SurveyFault]:
        """Check manifests, markers, checksums and host states.

        Ramdisks were checked by the survey, which leaves out what is damaged.
        """
        yield from self._survey.faults
        yield from self._nothing()
        counts = self.counts
        counts.manifests += len(self._copies)
        counts.host_states += sum(len(folder.host_states) for folder in self._survey.folders)
        yield from self._replicas()
        stored = [step for step in self._survey.of(PERSISTENT) if step.state != "damaged"]
        if not stored:
            return
        documents = functools.partial(self._documents, self._places.storage())
        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-check") as pool:
            for faults in pool.map(documents, self._survey.inspect_each(stored)):
                yield from faults

    def _nothing(self) -> Iterator[SurveyFault]:
        """Find places that exist and have nothing of a job: of them nothing can be good.

        A ramdisk may be empty beside others that are not, as that of a host that was replaced.
        """
        named = [fault.where for fault in self._survey.faults]
        for local_dir in () if self._survey.folders else self._places.local_dirs:
            if not any(Path(x).is_relative_to(local_dir) for x in named):
                yield SurveyFault(str(local_dir), "it has no directory of a job's process")
        stored = self._survey.directory
        if stored is None or stored.faults or stored.table is not None:
            return
        if not (stored.steps or stored.unfinished or stored.hidden):
            yield SurveyFault(stored.directory, "it has no step of a job, and no step log")

    def _replicas(self) -> Iterator[SurveyFault]:
        """Find replicas whose bytes differed at capture, or that one process changed since."""
        for save in self._survey.of(LOCAL):
            for divergence in divergences(self._survey.inventory(save.run_id), save.save):
                where = f"step {save.step} in RAM"
                yield SurveyFault(where, f"replicas differ: {divergence.describe()}", save.step)

    def _documents(
        self, tier: PersistentTier, looked_at: tuple[SurveyedStep, FoundStep | CheckpointError]
    ) -> list[SurveyFault]:
        number, stored_step = looked_at[0].step, looked_at[1]
        where = f"{self._places.directory}/{number}"
        if isinstance(stored_step, CheckpointError):
            return [SurveyFault.of(where, stored_step, number)]
        if stored_step.step.problem:
            return [SurveyFault(where, stored_step.step.problem, number)]
        faults: list[SurveyFault] = []
        self.found[number, stored_step.step.incarnation] = stored_step
        if stored_step.marker is None:
            return []  # a step of plain Orbax
        self.counts.manifests += 1
        step = tier.reader(stored_step)
        try:
            tier.read_checksums(stored_step.marker)
        except CheckpointError as error:
            faults.append(SurveyFault.of(error.target, error, number))
        for host_state, _ in step.documents():
            if host_state.empty:
                continue
            try:
                decode(step.document(host_state))
                self.counts.host_states += 1
            except CheckpointError as error:
                faults.append(SurveyFault.of(error.target, error, number))
        return faults

    @property
    def ram_bytes(self) -> int:
        """Return the bytes of all shards on the ramdisks."""
        return sum(
            entry.nbytes for copy in self._copies for entry in copy.published.contents.shards
        )

    def ram_data(self, advance: Advance) -> Iterator[SurveyFault]:
        """Compare the CRC32C of every shard on the ramdisks.

        A job removes a manifest before it writes to the slot, so damage counts only while the
        manifest is still the one that was read.
        """
        buffer = bytearray(_PIECE_BYTES)
        for copy in self._copies:
            path = f"{copy.folder}/{file_name(copy.number)}"
            step = copy.published.save.step
            try:
                damaged, shards, nbytes = self._damaged_shards(copy, buffer, advance)
            except (OSError, CorruptData) as error:
                if self._is_published(copy):
                    yield SurveyFault.of(path, error, step)
                else:
                    self.counts.gone += 1
                continue
            if damaged and not self._is_published(copy):
                self.counts.gone += 1
                continue
            self.counts.shards += shards
            self.counts.bytes += nbytes
            for line in damaged:
                yield SurveyFault(path, line, step)

    def _damaged_shards(
        self, copy: RamCopy, buffer: bytearray, advance: Advance
    ) -> tuple[list[str], int, int]:
        """Return a line for each damaged shard, and the numbers of shards and bytes read."""
        contents = copy.published.contents
        with ProcessFiles.opened(copy.folder, self._places.owner_uid) as place:
            fd = place.open_slot(copy.number)
        damaged: list[str] = []
        try:
            for entry in contents.shards:
                actual = _crc_of(fd, entry, buffer)
                advance(entry.nbytes)
                if actual != entry.crc32c:
                    path = contents.leaves[entry.leaf].path
                    actual_text = "cut short" if actual is None else f"{actual:08x}"
                    damaged.append(
                        f"{path}{describe(entry.box)} is damaged: its CRC32C differs from that of"
                        f" capture (expected {entry.crc32c:08x}, got {actual_text})"
                    )
        finally:
            os.close(fd)
        return damaged, len(contents.shards), sum(entry.nbytes for entry in contents.shards)

    def _is_published(self, copy: RamCopy) -> bool:
        try:
            path = copy.folder / manifest_name(copy.number)
            return os.stat(path, follow_symlinks=False).st_mtime == copy.saved_s
        except OSError:
            return False


def _crc_of(fd: int, entry: ShardEntry, buffer: bytearray) -> int | None:
    """Return the CRC32C of a shard's bytes; None when the file ends before them.

    Read, not mapped: a file that is cut meanwhile would be a SIGBUS.
    """
    crc, done = 0, 0
    view = memoryview(buffer)
    while done < entry.nbytes:
        piece = view[: min(len(buffer), entry.nbytes - done)]
        count = os.preadv(fd, [piece], entry.offset + done)
        if count == 0:
            return None
        crc = _native.crc32c(piece[:count], crc)
        done += count
    return crc
