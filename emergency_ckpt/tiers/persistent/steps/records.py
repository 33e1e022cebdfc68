"""Which steps a persistent directory has, and what each of them is worth."""

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
from emergency_ckpt.tiers.persistent.marker import (
    ASIDE_NAME,
    HOST_STATE,
    NO_SIGNING,
    StepMarker,
    TensorsId,
)
from emergency_ckpt.tiers.persistent.plain_orbax import LOOKS_AT_ONCE, StepFolders
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep, StepLooks
from emergency_ckpt.tiers.persistent.steps.replaced import ReplacedStep, ReplacedSteps, StepPlace
from emergency_ckpt.tiers.storage.directory import StorageDirectory
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, decode_timeline

OFFERED_AT_ONCE = 16
"""So many of the newest whole steps are offered to a restore, and so many of those that are not."""

_LARGEST_LOOK = 256
_LOOKS_AGAIN = 3
_T = TypeVar("_T")


class _Listing(NamedTuple):
    """The steps of a directory as they lie in it, and those that are kept aside for a while.

    ``own``: those that have an Orbax directory; whether there is one of ours beside it.
    """

    own: dict[int, bool]
    replaced: dict[int, ReplacedStep]

    def all(self) -> dict[int, bool]:
        """All that may count; of each, whether it may be one of ours."""
        return self.own | dict.fromkeys(self.replaced, True)


class StoredSteps:
    """Looks at the steps of one directory. All methods block for storage, until their deadline.

    A step of ours has a marker that can be read, and the tensors that the marker was written for.
    Tensors that plain Orbax has written in their place are a step of plain Orbax, whatever lies
    beside them. A marker that cannot be read is a step that has a problem: it is there, and
    nobody can say what it is.

    A step that was moved aside for a successor counts from there, until that is whole.

    Attributes:
      folders: the folder of each step, as it was listed last.
      passed_over: the steps, newest first, that ``newest`` last found before those that it offered,
        and that have a problem.
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
        """The newest steps that a restore may ask about, oldest first; and ``wanted``.

        At most ``OFFERED_AT_ONCE`` that seem whole, and as many newer ones that have a problem:
        however many of these there are, they take the place of no other. Once some are found, half
        of the time is all that is spent on older ones.

        Args:
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
            self._looks.tell(f"{left_out} folders with the names of steps are too many to look at")
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
        """Every step of ours that is whole by what its marker says, oldest first."""
        return [found.step for found in self.whole_found(deadline_s)]

    def whole_found(self, deadline_s: float | None = None) -> list[FoundStep]:
        """As ``whole``, each with its marker and its place."""
        deadline_s = self._storage.deadline_s(deadline_s)

        def look(listing: _Listing) -> list[FoundStep]:
            ours = sorted(step for step, is_ours in listing.all().items() if is_ours)
            return [each for each in self._look_at(ours, listing, deadline_s) if each.marker]

        return self._steadily(look, deadline_s)

    def all_there(self, deadline_s: float | None = None) -> list[FoundStep]:
        """Every step that is there, of whatever kind and with whatever problem, oldest first.

        Folders into which neither we nor Orbax have written anything are none.
        """
        deadline_s = self._storage.deadline_s(deadline_s)

        def look(listing: _Listing) -> list[FoundStep]:
            found = self._look_at(sorted(listing.all()), listing, deadline_s)
            return [each for each in found if not each.is_junk]

        return self._steadily(look, deadline_s)

    def find(self, step: int, deadline_s: float | None = None) -> FoundStep | None:
        """Return what counts as ``step``, wherever it lies; None when nothing does."""
        deadline_s = self._storage.deadline_s(deadline_s)
        return self._steadily(lambda listing: self._look_for(step, listing, deadline_s), deadline_s)

    def place_of(self, step: int, deadline_s: float | None = None) -> StepPlace:
        """Where ``step`` is to be read. Does not look whether it is there."""
        deadline_s = self._storage.deadline_s(deadline_s)
        found = None
        if step in self.replaced.read(deadline_s):
            found = self.find(step, deadline_s)
        return self._own_place(step) if found is None else found.place

    def _steadily(self, look: Callable[[_Listing], _T], deadline_s: float) -> _T:
        """The result of ``look``: once more when a step was moved aside, or came, meanwhile."""
        replaced = self.replaced.read(deadline_s)
        for _ in range(_LOOKS_AGAIN):
            found = look(_Listing(self.listed(deadline_s), replaced))
            before, replaced = replaced, self.replaced.read(deadline_s)
            if before == replaced:
                return found
        return look(_Listing(self.listed(deadline_s), replaced))

    def timeline(self, deadline_s: float | None = None) -> Timeline | None:
        """Which saves were rolled back, as storage knows it; None without a record. CorruptData."""
        below = f"{HOST_STATE}/{TIMELINE_NAME}"
        data = self._storage.bytes_of(below, deadline_s)
        return None if data is None else decode_timeline(data, f"{self._directory}/{below}")

    def listed(self, deadline_s: float | None) -> dict[int, bool]:
        """Steps that have an Orbax directory; whether there is one of ours beside it."""
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

        # Each takes a few requests, one after the other.
        with ThreadPoolExecutor(LOOKS_AT_ONCE, "eckpt-steps") as pool:
            return [found for found in pool.map(look, steps) if found is not None]

    def _look_for(self, step: int, listing: _Listing, deadline_s: float) -> FoundStep | None:
        """What counts as ``step``: in its own place, else where it is kept meanwhile."""
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
        """Return what lies in the own place of ``step``; None when it does not count.

        It has an Orbax directory; ``is_ours``: there is a folder of ours beside it.
        """
        place = self._own_place(step)
        if not is_ours:
            return self._looks.plain(step, place, deadline_s)
        if self._looks.exists(f"{HOST_STATE}/{step}/{ASIDE_NAME}", deadline_s):
            return None
        return self._looks.ours(step, place, deadline_s)

    def look_in_place(self, step: int, deadline_s: float | None = None) -> FoundStep | None:
        """As ``look``, of any step; None also when it is not there."""
        listed = self.listed(self._storage.deadline_s(deadline_s))
        return self.look(step, deadline_s, is_ours=listed[step]) if step in listed else None

    def _own_place(self, step: int) -> StepPlace:
        return StepPlace(self.folders.of(step), str(step))

    def is_replaced(self, step: int, deadline_s: float | None = None) -> bool:
        """Whether plain Orbax has written ``step``, beside which documents of ours lie."""
        found = self.look(step, deadline_s, is_ours=True)
        return found is not None and found.is_plain

    def marker(
        self, step: int, deadline_s: float | None = None, place: StepPlace | None = None
    ) -> StepMarker:
        """The marker of ``step``; PersistentTierError without one, CorruptData.

        ``place``: where the step lies; None: its own.
        """
        documents = str(step) if place is None else place.documents
        marker, _ = self._looks.marker(step, documents, deadline_s)
        return marker

    def tensors_id(self, step: int, deadline_s: float | None = None) -> TensorsId:
        """Which tensors lie in the own place of ``step``."""
        return self._looks.tensors_id(str(step), deadline_s)
