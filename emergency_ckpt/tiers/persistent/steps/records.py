"""The steps of a persistent directory, and the state of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.restore.plan_types import few
from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.core.step_names import in_order_of_looks
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CheckpointError, CorruptData
from emergency_ckpt.tiers.persistent.marker import (
    ASIDE_NAME,
    HOST_STATE,
    NO_SIGNING,
    StepMarker,
    TensorsId,
)
from emergency_ckpt.tiers.persistent.steps.folders import LOOKS_AT_ONCE, StepFolders
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep, StepLooks
from emergency_ckpt.tiers.persistent.steps.replaced import ReplacedStep, ReplacedSteps, StepPlace
from emergency_ckpt.tiers.storage.directory import StorageDirectory
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, decode_timeline
from emergency_ckpt.types import SaveId

OFFERED_AT_ONCE = 16
"""Maximum number of whole steps, and of damaged ones, that a restore is offered, newest first."""

_LARGEST_LOOK = 256
_LOOKS_AGAIN = 3
_T = TypeVar("_T")


class _Listing(NamedTuple):
    """The steps listed in a directory, and those kept aside for a successor.

    ``own``: steps with an Orbax directory; True when there is also a folder of ours.
    """

    own: dict[int, bool]
    replaced: dict[int, ReplacedStep]

    def all(self) -> dict[int, bool]:
        """Return all steps that may count; True for those that may be ours."""
        return self.own | dict.fromkeys(self.replaced, True)


class Inspection(NamedTuple):
    """All that a directory has.

    Attributes:
      steps: by number; None for a folder that does not count, as of a save that has not ended.
      errors: of the directory's own records.
    """

    steps: dict[int, FoundStep | CheckpointError | None]
    errors: tuple[CheckpointError, ...]


class StoredSteps:
    """Inspects the steps of one directory. All methods block for storage, until their deadline.

    A step of ours has a readable marker and the tensors that the marker identifies. Tensors that
    plain Orbax wrote in their place are a step of plain Orbax. A step with an unreadable marker has
    a problem: it exists, but its contents are not known.

    A step that was moved aside for a successor counts until the successor is whole.

    Attributes:
      folders: the folder of each step, as of the last listing.
      passed_over: the steps with a problem, newest first, that are newer than those that the last
        call of ``newest`` offered.
      replaced: the record of steps that were moved aside for a successor.
    """

    def __init__(self, storage: StorageDirectory, signing: StepSigning = NO_SIGNING) -> None:
        self._storage = storage
        self._directory = storage.path
        self.folders = StepFolders(storage)
        self.passed_over: tuple[int, ...] = ()
        self.replaced = ReplacedSteps(storage)
        self._looks = StepLooks(storage, self.folders, signing)

    def newest(
        self,
        deadline_s: float | None = None,
        *,
        wanted: int | None = None,
        below: int | None = None,
    ) -> list[PersistentStep]:
        """Return the newest steps for a restore, oldest first, and ``wanted``.

        At most ``OFFERED_AT_ONCE`` steps that seem whole, and in addition as many newer ones with a
        problem. Once some are found, at most half of the time is spent on older ones.

        Args:
          wanted: a step to include however old it is, or None.
          below: offer only steps before this one; None: all.
        """
        begin_s, end_s = time.monotonic(), self._storage.deadline_s(deadline_s)
        half_s = (begin_s + end_s) / 2
        return self._steadily(
            lambda listing: self._newest(listing, wanted, below, half_s, end_s), end_s
        )

    def _newest(
        self,
        listing: _Listing,
        wanted: int | None,
        below: int | None,
        half_s: float,
        deadline_s: float,
    ) -> list[PersistentStep]:
        listed = listing.all()
        looks, left_out = in_order_of_looks(listed, below)
        whole: list[PersistentStep] = []
        others: list[FoundStep] = []
        size = OFFERED_AT_ONCE
        while looks and len(whole) < OFFERED_AT_ONCE:
            if whole and time.monotonic() > half_s:
                break
            some, looks = looks[:size], looks[size:]
            for found in self._look_at(some, listing, deadline_s):
                if found.step.problem:
                    others.append(found)
                else:
                    whole.append(found.step)
            size = min(2 * size, _LARGEST_LOOK)
        if not looks and left_out:
            self._looks.tell(f"{left_out} folders with the names of steps are too many to inspect")
        whole = whole[:OFFERED_AT_ONCE]
        oldest = whole[-1].step if whole else -1
        others = [found for found in others if found.step.step > oldest]
        self._note_passed_over(others)
        offered = whole + [found.step for found in others[:OFFERED_AT_ONCE]]
        if wanted in listed and all(each.step != wanted for each in offered):
            offered += [each.step for each in self._look_at([wanted], listing, deadline_s)]
        return sorted(offered)

    def _note_passed_over(self, others: Sequence[FoundStep]) -> None:
        self.passed_over = tuple(found.step.step for found in others)
        junk = [found.step.step for found in others if found.is_junk]
        if junk:
            self._looks.tell(
                f"passed over {len(junk)} folders with the names of steps, into which Orbax has"
                f" written nothing: {few([str(step) for step in junk])}"
            )

    def whole(self, deadline_s: float | None = None) -> list[PersistentStep]:
        """Return every step of ours that is whole by its marker, oldest first."""
        return [found.step for found in self.whole_found(deadline_s)]

    def whole_found(self, deadline_s: float | None = None) -> list[FoundStep]:
        """Return the steps of ``whole``, each with its marker and its place."""
        deadline_s = self._storage.deadline_s(deadline_s)

        def look(listing: _Listing) -> list[FoundStep]:
            ours = sorted(step for step, is_ours in listing.all().items() if is_ours)
            return [each for each in self._look_at(ours, listing, deadline_s) if each.marker]

        return self._steadily(look, deadline_s)

    def all_there(self, deadline_s: float | None = None) -> list[FoundStep]:
        """Return every existing step, of any kind and with any problem, oldest first.

        A folder into which neither this package nor Orbax wrote is no step.
        """
        deadline_s = self._storage.deadline_s(deadline_s)

        def look(listing: _Listing) -> list[FoundStep]:
            found = self._look_at(sorted(listing.all()), listing, deadline_s)
            return [each for each in found if not each.is_junk]

        return self._steadily(look, deadline_s)

    def inspect(self, deadline_s: float | None = None) -> Inspection:
        """Return every folder with the name of a step, each with its own error if it has one.

        PersistentTierError only when the directory itself cannot be listed.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        errors: list[CheckpointError] = []
        try:
            replaced = self.replaced.read(deadline_s)
        except CorruptData as error:
            errors.append(error)
            replaced = {}
        listing = _Listing(self.listed(deadline_s), replaced)

        def look(step: int) -> FoundStep | CheckpointError | None:
            try:
                return self._look_for(step, listing, deadline_s)
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(LOOKS_AT_ONCE, "eckpt-steps") as pool:
            found = dict(
                zip(sorted(listing.all()), pool.map(look, sorted(listing.all())), strict=True)
            )
        return Inspection(found, tuple(errors))

    def find(self, step: int, deadline_s: float | None = None) -> FoundStep | None:
        """Return what counts as ``step``, in its own place or kept aside, or None."""
        deadline_s = self._storage.deadline_s(deadline_s)
        return self._steadily(lambda listing: self._look_for(step, listing, deadline_s), deadline_s)

    def place_of(self, step: int, deadline_s: float | None = None) -> StepPlace:
        """Return the folders to read ``step`` from; they need not exist."""
        deadline_s = self._storage.deadline_s(deadline_s)
        found = None
        if step in self.replaced.read(deadline_s):
            found = self.find(step, deadline_s)
        return self._own_place(step) if found is None else found.place

    def _steadily(self, look: Callable[[_Listing], _T], deadline_s: float) -> _T:
        """Return the result of ``look``; repeat it if steps were moved or added meanwhile."""
        replaced = self.replaced.read(deadline_s)
        for _ in range(_LOOKS_AGAIN):
            found = look(_Listing(self.listed(deadline_s), replaced))
            before, replaced = replaced, self.replaced.read(deadline_s)
            if before == replaced:
                return found
        return look(_Listing(self.listed(deadline_s), replaced))

    def timeline(self, deadline_s: float | None = None) -> Timeline | None:
        """Return the recorded timeline of rolled-back saves, or None. CorruptData."""
        below = f"{HOST_STATE}/{TIMELINE_NAME}"
        data = self._storage.bytes_of(below, deadline_s)
        return None if data is None else decode_timeline(data, f"{self._directory}/{below}")

    def listed(self, deadline_s: float | None) -> dict[int, bool]:
        """Return the steps with an Orbax directory; True for those that also have one of ours."""
        steps = self.folders.steps(deadline_s)
        if not steps:
            self._storage.check_bucket(deadline_s)
            return {}
        ours = self._storage.numbers_in(HOST_STATE, deadline_s)
        return {step: step in ours and self.folders.of(step) == str(step) for step in steps}

    def _look_at(
        self, steps: Iterable[int], listing: _Listing, deadline_s: float
    ) -> list[FoundStep]:
        def look(step: int) -> FoundStep | None:
            return self._look_for(step, listing, deadline_s)

        # Each step takes a few requests in sequence.
        with ThreadPoolExecutor(LOOKS_AT_ONCE, "eckpt-steps") as pool:
            return [found for found in pool.map(look, steps) if found is not None]

    def _look_for(self, step: int, listing: _Listing, deadline_s: float) -> FoundStep | None:
        """Return what counts as ``step``: in its own place, else kept aside."""
        found = None
        if step in listing.own:
            found = self.look(step, deadline_s, is_ours=listing.own[step])
        entry = listing.replaced.get(step)
        if entry is None or (found is not None and not found.is_junk):
            return found
        place = self.replaced.place(entry, self.folders.of(step), deadline_s)
        if place is None:
            return found
        look = self._looks.plain if entry.is_plain else self._looks.ours
        return look(step, place, deadline_s)

    def look(
        self, step: int, deadline_s: float | None = None, *, is_ours: bool
    ) -> FoundStep | None:
        """Return the step in its own place, or None when it does not count.

        It has an Orbax directory; ``is_ours``: it also has a folder of ours.
        """
        place = self._own_place(step)
        if not is_ours:
            return self._looks.plain(step, place, deadline_s)
        if self._looks.exists(f"{HOST_STATE}/{step}/{ASIDE_NAME}", deadline_s):
            return None
        return self._looks.ours(step, place, deadline_s)

    def look_in_place(self, step: int, deadline_s: float | None = None) -> FoundStep | None:
        """Return the step in its own place, or None when it does not exist or does not count."""
        listed = self.listed(self._storage.deadline_s(deadline_s))
        return self.look(step, deadline_s, is_ours=listed[step]) if step in listed else None

    def has_objects(self, step: int, deadline_s: float | None = None) -> bool:
        """Return True when an object store has anything for ``step`` in its own place."""
        deadline_s = self._storage.deadline_s(deadline_s)
        if step in self.folders.steps(deadline_s):
            return True
        return step in self._storage.numbers_in(HOST_STATE, deadline_s)

    def _own_place(self, step: int) -> StepPlace:
        return StepPlace(self.folders.of(step), str(step))

    def is_replaced(self, step: int, deadline_s: float | None = None) -> bool:
        """Return True when plain Orbax has written ``step``, for which we have documents."""
        found = self.look(step, deadline_s, is_ours=True)
        return found is not None and found.is_plain

    def marker(
        self, step: int, deadline_s: float | None = None, place: StepPlace | None = None
    ) -> StepMarker:
        """Return the marker of ``step``; PersistentTierError without one, CorruptData.

        ``place``: the step's folders; None: its own place.
        """
        documents = str(step) if place is None else place.documents
        marker, _ = self._looks.marker(step, documents, deadline_s)
        return marker

    def tensors_id(self, save: SaveId, deadline_s: float | None = None) -> TensorsId:
        """Return the identity of the tensors in the step's own place.

        PersistentTierError when another save has written them.
        """
        return self._looks.tensors_id(save, deadline_s)
