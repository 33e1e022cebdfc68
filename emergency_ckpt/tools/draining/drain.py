"""The newest whole step in RAM, written into the persistent directory of its run.

1. Refuse while a process of the job has a directory of these ramdisks.
2. Choose the newest whole save by the newest timeline; nothing is to be done when storage has it,
   or a newer step that counts.
3. Read and check every shard and every host state.
4. Write it as a save of the dead life does: claim, room, host states, tensors, checksums, the
   marker, a version of the log.

A kill at any instant leaves storage as a killed save does: the steps before count, and the next
save, or the next drain of the step, removes the rest. A job or a drain that begins meanwhile takes
the claim, and this one ends with DirectoryInUse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence

import msgspec

from emergency_ckpt.config import Config, run_id_of
from emergency_ckpt.core.restore.inventory import PersistentStep, newest_timeline
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.core.timeline import life_of
from emergency_ckpt.errors import (
    CorruptData,
    HostStateError,
    LocalTierError,
)
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.ram.locks import current_holder
from emergency_ckpt.ram.step_reader import RamStep
from emergency_ckpt.storage.directory_writer import DirectoryWriter
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.tier import Array, leaf_bytes
from emergency_ckpt.tools.draining.peer_ram import peer_ram
from emergency_ckpt.tools.survey.places import Places, SurveyedStep
from emergency_ckpt.tools.survey.ramdisk import ram_parts
from emergency_ckpt.tools.survey.survey import Survey, take_survey, with_folders
from emergency_ckpt.transfer.pool import each_address
from emergency_ckpt.types import LOCAL, Box, SaveId
from emergency_ckpt.work_progress import WorkProgress

Progress = Callable[[int], None]
Shown = Callable[[str, int], Progress]
"""Shows the progress of some work of so many bytes."""


class Drained(msgspec.Struct, frozen=True):
    """The outcome of a drain, as ``eckpt drain --json`` prints it.

    Attributes:
      step: the one that was written, or the newest that storage has; None without any.
      is_saved: no step is known to have been whole that is newer than ``step``.
      is_written: this drain wrote ``step``.
      notes: what is missing, and what was passed over.
    """

    step: int | None
    is_saved: bool
    is_written: bool
    notes: tuple[str, ...]


class _LostMeanwhile(CorruptData):
    """A shard that was sound when it was checked cannot be read again: a peer has died."""


class _DrainedStep(RamStep):
    """A save in RAM whose bytes are read twice: for a check of all, and when they are written."""

    progress: Progress
    is_checked = False

    def read(self, path: str, box: Box) -> Array:
        """Read a box and show it; _LostMeanwhile where it was sound before."""
        try:
            array = super().read(path, box)
        except CorruptData as error:
            if not self.is_checked:
                raise
            raise _LostMeanwhile(error.operation, error.target, error.problem) from error
        self.progress(array.nbytes)
        return array

    def check(self) -> None:
        """Read every byte once, so that nothing in storage is touched for a damaged save."""
        for path in self.leaves:
            for box in self.boxes(path):
                self.read(path, box)
        self.host_states()
        self.is_checked = True


def drain(places: Places, shown: Shown, stall_s: float, peers: Sequence[str] = ()) -> Drained:
    """Write the newest whole step of the ramdisks and peers into ``places.directory``. Blocks.

    ConfigError, DirectoryInUse when another run saves there, LocalTierError while the job runs,
    PersistentTierError, CorruptData of a record in storage.

    Args:
      stall_s: longest time in which nothing of the write moves, and of one call to storage.
      peers: addresses of ``eckpt serve`` on other hosts, or names that stand for several.
    """
    survey = take_survey(dataclasses.replace(places, directory=""))
    run_id = survey.only_run(peers, "eckpt drain") or run_id_of(places.directory)
    _check_ended(survey, run_id, places)
    notes: list[str] = []

    def note_hidden(event: Event) -> None:
        if event.point == "persistent.removal.hidden":
            step, folder, reason = (event.fields[field] for field in ("step", "kept_as", "reason"))
            notes.append(f"step {step} is kept as {folder}: {reason}")

    tier = places.storage(stall_s)
    tier.create()
    tier.writer = writer = DirectoryWriter(
        tier.storage,
        tier.found,
        run_id=run_id,
        from_dir=run_id == run_id_of(tier.directory),
        writer=f"drain-{secrets.token_hex(8)}",
        emit=EventSink(note_hidden, process_index=0).emit,
    )
    writer.find()
    progress = WorkProgress(TimeLimits(stall_s, max(stall_s, Config.total_timeout_s)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress.clock)
        if peers:
            addresses = (address for name in peers for address in each_address(name))
            others = stack.enter_context(
                peer_ram(survey, run_id, addresses, "eckpt drain", progress)
            )
            running = [peer.address for peer in others.asked if peer.process_index is not None]
            if running:
                text = f"the job still runs: its process answers at {running[0]}"
                raise LocalTierError("drain", f"run {run_id!r}", text)
            survey = with_folders(survey, others.folders)
            notes += [f"{fault.where}: {fault.problem}" for fault in others.faults]
        return _Drain(survey, run_id, tier, writer, notes, progress).run(shown)


def _check_ended(survey: Survey, run_id: str, places: Places) -> None:
    for folder in survey.folders:
        holder = None
        if folder.run_id == run_id:
            try:
                holder = current_holder(folder.path, places.owner_uid)
            except OSError as error:
                raise LocalTierError("drain", str(folder.path), str(error)) from error
        if holder is not None:
            raise LocalTierError(
                "drain",
                str(folder.path),
                f"the job still runs: {holder.describe()} has it",
                hint="drain when the job has ended for good; a job that runs saves by itself",
            )


@dataclasses.dataclass
class _Drain:
    """One drain of one run, alone in its directory.

    ``_notes``: of the outcome, to which the directory's writer adds as well.
    """

    _survey: Survey
    _run_id: str
    _tier: PersistentTier
    _writer: DirectoryWriter
    _notes: list[str]
    _progress: WorkProgress

    def __post_init__(self) -> None:
        self._holders = self._survey.inventory(self._run_id).holders
        self._timeline = newest_timeline(self._holders, table=self._writer.table)

    def run(self, shown: Shown) -> Drained:
        """Write the newest whole save, unless storage has that or a newer step that counts."""
        self._notes += [f"{fault.where}: {fault.problem}" for fault in self._survey.faults]
        candidates: list[SurveyedStep] = []
        for step in self._survey.of(LOCAL):
            reason = self._rejection_reason(step.step, step.incarnation)
            if step.run_id == self._run_id and not reason:
                candidates.append(step)
            elif step.run_id == self._run_id:
                self._notes.append(f"step {step.step} in RAM is passed over: {reason}")
        table, stored = self._writer.table, self._newest_stored()
        recorded = None if table is None else table.chain
        if (
            stored is not None
            and recorded == self._timeline
            and all(_has(stored, step.save) for step in candidates)
        ):
            return self._outcome(stored.step)  # without a change in storage
        for step in candidates:
            if stored is not None and _has(stored, step.save):
                break
            reason = step.reason or self._write(step, shown)
            if not reason:
                return self._outcome(step.step, is_written=True)
            self._notes.append(f"step {step.step} in RAM is passed over: {reason}")
        if stored is not None:
            self._writer.begin(self._life(stored.incarnation), self._timeline)
        else:
            where = ", ".join(map(str, self._survey.places.local_dirs)) or "the RAM of these peers"
            self._notes.append(f"no whole step of run {self._run_id!r} is in {where}")
        return self._outcome(stored.step if stored else None)

    def _write(self, surveyed: SurveyedStep, shown: Shown) -> str:
        """Read and check a save, then write it; return why that is not possible, or ""."""
        step = _DrainedStep(surveyed.save, *ram_parts(self._survey.folders, surveyed.save))
        total_bytes = sum(map(leaf_bytes, step.leaves.values()))
        try:
            step.progress = shown(f"check step {surveyed.step}", total_bytes)
            step.check()
        except (CorruptData, HostStateError, LocalTierError) as error:
            return str(error)
        try:
            step.progress = shown(f"write step {surveyed.step}", total_bytes)
            life = self._life(surveyed.incarnation)
            self._tier.publish(step, life, self._timeline, self._progress)
        except _LostMeanwhile as error:
            return str(error)
        self._notes += step.notes
        return ""

    def _outcome(self, step: int | None, *, is_written: bool = False) -> Drained:
        """Return the outcome; a newer whole step than ``step`` was lost, or is elsewhere."""
        known = [holder.known_complete for holder in self._holders]
        lost = max(
            (
                save.step
                for save in known
                if save is not None and not self._rejection_reason(save.step, save.incarnation)
            ),
            default=-1,
        )
        is_saved = step is not None and step >= lost
        if step is not None and not is_saved:
            self._notes.append(
                f"step {lost} was whole in RAM once, and is not on these ramdisks: give the"
                " --local-dir of every host that is left"
            )
        return Drained(step, is_saved, is_written, tuple(self._notes))

    def _newest_stored(self) -> PersistentStep | None:
        """Return the newest step in storage that a restore would take, as its files have it."""
        stored = self._tier.found
        view = stored.view()
        for item in reversed(stored.resolved(view)):
            if item.problem or self._rejection_reason(item.step, item.incarnation):
                continue
            stored_step = stored.inspect(view, item)
            if stored_step is not None and not stored_step.step.problem:
                return stored_step.step
        return None

    def _rejection_reason(self, step: int, incarnation: str) -> str:
        return self._timeline.rejection_reason(step, incarnation) if self._timeline else ""

    def _life(self, incarnation: str) -> str:
        """Return the dead life that this drain writes as: that of the save, or one on record.

        A later life that is on record may have saved nothing.
        """
        table = self._writer.table
        return max(life_of(incarnation), "" if table is None else table.incarnation)


def _has(stored: PersistentStep, save: SaveId) -> bool:
    """Return whether a restore would take ``stored`` rather than ``save``, or they are the same.

    Of two saves of one step the later life's goes first. The save itself goes before its stored
    tensors whose host states are gone.
    """
    is_same = (stored.step, stored.tensors_of) == (save.step, save.incarnation)
    return not is_same and (stored.step, stored.incarnation) >= (save.step, save.incarnation)
