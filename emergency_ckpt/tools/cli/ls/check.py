"""``eckpt ls --check``: what is damaged, in manifests and markers, or in every byte."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from emergency_ckpt import _native, files
from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.divergence import divergences
from emergency_ckpt.core.shard_layout import shard_nbytes, state_size_bytes
from emergency_ckpt.core.wording import count_text, size_text
from emergency_ckpt.errors import CheckpointError, CorruptData
from emergency_ckpt.ram.process_files import ProcessFiles, file_name, manifest_name
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, places_of, print_json
from emergency_ckpt.tools.cli.output import ProgressLines, print_faults, print_line
from emergency_ckpt.tools.survey.places import Places, SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import RamCopy
from emergency_ckpt.tools.survey.survey import Survey, take_survey
from emergency_ckpt.types import LOCAL, PERSISTENT, ShardEntry, ShardId

if TYPE_CHECKING:
    from emergency_ckpt.storage.tier import StoredStepReader

FORMAT = 2

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

    def __init__(self, survey: Survey) -> None:
        self.counts = CheckCounts()
        self.found: dict[tuple[int, str], FoundStep] = {}
        self._survey = survey
        self._places = survey.places
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
            step, shards = copy.published.save.step, copy.published.contents.shards
            try:
                damage = list(self._damage_in(copy, buffer, advance))
                faults = [SurveyFault(path, line, step) for line in damage]
            except (OSError, CorruptData) as error:
                faults, shards = [SurveyFault.of(path, error, step)], ()
            if faults and not self._is_published(copy):
                self.counts.gone += 1
                continue
            self.counts.shards += len(shards)
            self.counts.bytes += sum(entry.nbytes for entry in shards)
            yield from faults

    def _damage_in(self, copy: RamCopy, buffer: bytearray, advance: Advance) -> Iterator[str]:
        """Read all shards of a copy and yield a line for each damaged one. OSError, CorruptData."""
        contents = copy.published.contents
        with (
            ProcessFiles.opened(copy.folder, self._places.owner_uid) as place,
            files.closing(place.open_slot(copy.number)) as fd,
        ):
            for entry in contents.shards:
                actual = _crc_of(fd, entry, buffer)
                advance(entry.nbytes)
                if actual != entry.crc32c:
                    shard = f"{contents.leaves[entry.leaf].path}{describe(entry.box)}"
                    yield f"{shard} {_damage(entry.crc32c, actual)}"

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


def _damage(expected: int, actual: int | None) -> str:
    """Return what is wrong with a shard; ``actual`` is None where the file ends before it."""
    actual_text = "cut short" if actual is None else f"{actual:08x}"
    return (
        "is damaged: its CRC32C differs from that of capture"
        f" (expected {expected:08x}, got {actual_text})"
    )


def _stored_data(
    stored_step: FoundStep, places: Places, counts: CheckCounts, advance: Advance
) -> Iterator[SurveyFault]:
    """Read a step from storage and yield a fault for each box that is damaged. Blocks.

    ``places.timeout_s`` bounds the reading of each ``PIECE_BYTES``.
    """
    number = stored_step.step.step
    name = f"{places.directory}/{number}"
    step = places.storage().reader(stored_step)
    try:
        step.arrays()
        pieces = list(_pieces(step))
    except CheckpointError as error:
        yield SurveyFault.of(name, error, number)
        return
    for some, nbytes in pieces:
        try:
            damaged = list(_damaged_boxes(step, some, counts))
        except CheckpointError as error:
            if error.retryable:
                yield SurveyFault.of(name, error, number)
                return
            # A box that cannot be decoded ends the reading of all boxes: read alone, it shows
            # itself.
            damaged = list(_one_by_one(step, some))
        for shard, problem in damaged:
            yield SurveyFault(f"{name}, {shard.leaf}{describe(shard.box)}", problem, number)
        advance(nbytes)


def _damaged_boxes(
    step: StoredStepReader, some: list[ShardId], counts: CheckCounts
) -> Iterator[tuple[ShardId, str]]:
    for shard, array in step.read_all(some):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        counts.bytes += len(data)
        expected = step.crcs(shard.leaf).get(shard.box)
        if expected is None:
            continue
        counts.shards += 1
        actual = _native.crc32c(data)
        if actual != expected:
            yield shard, f"it {_damage(expected, actual)}"


def _pieces(step: StoredStepReader) -> Iterator[tuple[list[ShardId], int]]:
    """Yield the boxes of a step in parts of about ``PIECE_BYTES``, with their bytes."""
    # Imported here: Orbax, which a check of RAM does without, takes seconds.
    from emergency_ckpt.storage.tier import PIECE_BYTES  # noqa: PLC0415

    some: list[ShardId] = []
    total = 0
    for path, leaf in step.leaves.items():
        for box in step.boxes(path):
            some.append(ShardId(path, box))
            total += shard_nbytes(leaf, box)
            if total >= PIECE_BYTES:
                yield some, total
                some, total = [], 0
    if some:
        yield some, total


def _one_by_one(step: StoredStepReader, some: list[ShardId]) -> Iterator[tuple[ShardId, str]]:
    for shard in some:
        try:
            step.read(shard.leaf, shard.box)
        except CheckpointError as error:
            yield shard, error.problem
            if error.retryable:
                return  # storage is away: each of the others would wait as long


class CheckResult(msgspec.Struct, frozen=True):
    """The result, as JSON. ``steps``: as ``eckpt ls`` lists them."""

    format: int
    good: bool
    read_data: bool
    checked: CheckCounts
    steps: tuple[SurveyedStep, ...]
    faults: tuple[SurveyFault, ...]


def run(args: argparse.Namespace) -> int:
    """Check; return 1 when something is damaged, absent or could not be read."""
    survey = take_survey(places_of(args))
    check = Check(survey)
    faults = list(check.small_files())
    if args.read_data:
        faults += _data(check, survey.places)
    faults = list(dict.fromkeys(faults))
    result = CheckResult(
        format=FORMAT,
        good=not faults,
        read_data=args.read_data,
        checked=check.counts,
        steps=survey.steps,
        faults=tuple(faults),
    )
    if args.json:
        print_json(result)
    else:
        _print(result)
    return GOOD if result.good else BAD


def _data(check: Check, places: Places) -> Iterator[SurveyFault]:
    stored = list(check.found.values())
    sizes = (
        state_size_bytes(stored_step.marker.leaves) for stored_step in stored if stored_step.marker
    )
    total_bytes = check.ram_bytes + sum(sizes)
    advance = ProgressLines("check", total_bytes)
    yield from check.ram_data(advance)
    for stored_step in stored:
        yield from _stored_data(stored_step, places, check.counts, advance)


def _print(result: CheckResult) -> None:
    counts = result.checked
    states = [step.state.replace("_", " ") for step in result.steps]
    by_state = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print_line(f"{count_text(len(states), 'step', 'steps')}{': ' if by_state else ''}{by_state}")
    checked = [
        count_text(counts.manifests, "manifest or marker", "manifests and markers"),
        count_text(counts.host_states, "host state", "host states"),
    ]
    if result.read_data:
        shards = count_text(counts.shards, "shard", "shards")
        checked.append(f"{shards} ({size_text(counts.bytes)})")
    print_line(f"checked: {', '.join(checked)}")
    if counts.gone:
        gone = count_text(counts.gone, "slot was", "slots were")
        print_line(f"{gone} saved over meanwhile and not checked")
    if result.good:
        print("good")
    else:
        print_line(f"{count_text(len(result.faults), 'fault', 'faults')}:")
    print_faults(result.faults)
