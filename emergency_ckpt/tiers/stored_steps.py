"""Which steps a persistent directory has, and what each of them is worth."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from emergency_ckpt.core.inventory import PersistentStep, plain_incarnation
from emergency_ckpt.core.plan_types import few
from emergency_ckpt.core.step_names import in_order_of_looks
from emergency_ckpt.core.step_signature import StepSigning
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.orbax_writing import ITEM, OURS
from emergency_ckpt.tiers.persistent_marker import (
    ASIDE_NAME,
    HOST_STATE,
    MARKER_NAME,
    NO_SIGNING,
    StepMarker,
    TensorsId,
    check_marker,
)
from emergency_ckpt.tiers.plain_orbax import ITEMS, LOOKS_AT_ONCE, StepFolders
from emergency_ckpt.tiers.storage_directory import StorageDirectory
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, decode_timeline

OFFERED_AT_ONCE = 16
"""So many of the newest whole steps are offered to a restore, and so many of those that are not."""

_METADATA = "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_WARNINGS = 16
_LARGEST_LOOK = 256
_REPLACED = "another program has written it anew: it has tensors only"
_GONE = "its tensors are gone"
_NO_STEP = "its folder has the name of a step, and Orbax has written nothing into it"


class FoundStep(NamedTuple):
    """A step that is there.

    Attributes:
      marker: None for one of plain Orbax, or with a ``problem``.
      is_junk: neither we nor Orbax have written anything into its folder. It has a ``problem``.
    """

    step: PersistentStep
    marker: StepMarker | None
    is_junk: bool = False


class StoredSteps:
    """Looks at the steps of one directory. All methods block for storage, until their deadline.

    A step of ours has a marker that can be read, and the tensors that the marker was written for.
    Tensors that plain Orbax has written in their place are a step of plain Orbax, whatever lies
    beside them. A marker that cannot be read is a step that has a problem: it is there, and
    nobody can say what it is.

    Attributes:
      folders: the folder of each step, as it was listed last.
      passed_over: the steps, newest first, that ``newest`` last found before those that it offered,
        and that have a problem.
    """

    def __init__(self, storage: StorageDirectory, signing: StepSigning = NO_SIGNING) -> None:
        self._storage = storage
        self._signing = signing
        self._directory = storage.path
        self.folders = StepFolders(storage)
        self.passed_over: tuple[int, ...] = ()
        self._told: set[str] = set()

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
        begin_s, deadline_s = time.monotonic(), self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        looks, left_out = in_order_of_looks(listed, below)
        whole: list[PersistentStep] = []
        others: list[FoundStep] = []
        size = OFFERED_AT_ONCE
        while looks and len(whole) < OFFERED_AT_ONCE:
            if whole and time.monotonic() > (begin_s + deadline_s) / 2:
                break
            some, looks = looks[:size], looks[size:]
            for found in self._look_at(some, listed, deadline_s):
                if found.step.problem:
                    others.append(found)
                else:
                    whole.append(found.step)
            size = min(2 * size, _LARGEST_LOOK)
        if not looks and left_out:
            self._tell(f"{left_out} folders with the names of steps are too many to look at")
        whole = whole[:OFFERED_AT_ONCE]
        oldest = whole[-1].step if whole else -1
        others = [found for found in others if found.step.step > oldest]
        self._note_passed_over(others)
        offered = whole + [found.step for found in others[:OFFERED_AT_ONCE]]
        if wanted in listed and all(each.step != wanted for each in offered):
            offered += [each.step for each in self._look_at([wanted], listed, deadline_s)]
        return sorted(offered)

    def _note_passed_over(self, others: Sequence[FoundStep]) -> None:
        self.passed_over = tuple(found.step.step for found in others)
        junk = [found.step.step for found in others if found.is_junk]
        if junk:
            self._tell(
                f"passed over {len(junk)} folders with the names of steps, into which Orbax has"
                f" written nothing: {few([str(step) for step in junk])}"
            )

    def whole(self, deadline_s: float | None = None) -> list[PersistentStep]:
        """Every step of ours that is whole by what its marker says, oldest first."""
        deadline_s = self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        ours = [step for step in sorted(listed) if listed[step]]
        return [each.step for each in self._look_at(ours, listed, deadline_s) if each.marker]

    def all_there(self, deadline_s: float | None = None) -> list[PersistentStep]:
        """Every step that is there, of whatever kind and with whatever problem, oldest first.

        Folders into which neither we nor Orbax have written anything are none.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        found = self._look_at(sorted(listed), listed, deadline_s)
        return [each.step for each in found if not each.is_junk]

    def timeline(self, deadline_s: float | None = None) -> Timeline | None:
        """Which saves were rolled back, as storage knows it; None without a record. CorruptData."""
        below = f"{HOST_STATE}/{TIMELINE_NAME}"
        data = self._bytes(below, deadline_s)
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
        self, steps: Iterable[int], listed: Mapping[int, bool], deadline_s: float
    ) -> list[FoundStep]:
        def look(step: int) -> FoundStep | None:
            return self.look(step, deadline_s, is_ours=listed[step])

        # Each takes a few requests, one after the other.
        with ThreadPoolExecutor(LOOKS_AT_ONCE, "eckpt-steps") as pool:
            return [found for found in pool.map(look, steps) if found is not None]

    def look(
        self, step: int, deadline_s: float | None = None, *, is_ours: bool
    ) -> FoundStep | None:
        """Return the record of ``step``, which has an Orbax directory; None when it does not count.

        ``is_ours``: there is a folder of ours beside it.
        """
        if not is_ours:
            return self._plain(step, deadline_s)
        if self._exists(f"{HOST_STATE}/{step}/{ASIDE_NAME}", deadline_s):
            return None
        try:
            marker, doubt = self._checked_marker(step, deadline_s)
        except CorruptData as error:
            self._warn(step, str(error))
            problem = _unreadable(step, error.problem)
            return FoundStep(PersistentStep(step, 0, False, problem=problem), None)
        except PersistentTierError as error:
            # Absent means not saved whole. Unreachable does not: then an older step must not be
            # taken for the newest.
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            written_here = self._is_written_here(step, deadline_s)
            return None if written_here else self._plain(step, deadline_s)
        return self._marked(step, marker, doubt, deadline_s)

    def _marked(
        self, step: int, marker: StepMarker, doubt: str, deadline_s: float | None
    ) -> FoundStep | None:
        problem = ""
        if marker.tensors is not None:
            problem = self._compare_tensors(step, marker.tensors, deadline_s)
        elif not self.folders.is_written_by_orbax(str(step), deadline_s):
            problem = _GONE
        if problem == _REPLACED:
            self._warn(step, problem)
            return self._plain(step, deadline_s)
        path = f"{HOST_STATE}/{step}/{MARKER_NAME}"
        if problem == _GONE and not self._exists(path, deadline_s):
            return None  # it is being removed
        problem = problem or self._signing.objection(doubt)
        if problem:
            self._warn(step, problem)
        found = PersistentStep(
            step,
            len(marker.digests),
            not all(marker.empty),
            incarnation=marker.save.incarnation,
            problem=problem,
            doubt=doubt,
        )
        return FoundStep(found, None if problem else marker)

    def marker(self, step: int, deadline_s: float | None = None) -> StepMarker:
        """The marker of ``step``; PersistentTierError without one, CorruptData."""
        marker, _ = self._checked_marker(step, deadline_s)
        return marker

    def _checked_marker(self, step: int, deadline_s: float | None) -> tuple[StepMarker, str]:
        path = self._directory / HOST_STATE / str(step) / MARKER_NAME
        below = f"/{HOST_STATE}/{step}/{MARKER_NAME}"
        data = self._storage.do("read", below, path.read_bytes, deadline_s)
        return check_marker(data, step, str(path), self._signing)

    def tensors_id(self, step: int, deadline_s: float | None = None) -> TensorsId:
        """Which tensors lie under ``step``."""
        return TensorsId(
            _digest(self._bytes(f"{step}/{_METADATA}", deadline_s)),
            _digest(self._bytes(f"{step}/{ITEM}/{_MANIFEST}", deadline_s)),
        )

    def _compare_tensors(self, step: int, expected: TensorsId, deadline_s: float | None) -> str:
        """Why they are not those of the marker, if so. Of the two witnesses one may be hurt."""
        metadata = self._bytes(f"{step}/{_METADATA}", deadline_s)
        if _digest(metadata) == expected.metadata:
            return ""
        manifest = self._bytes(f"{step}/{ITEM}/{_MANIFEST}", deadline_s)
        if metadata is None and manifest is None:
            return _GONE
        if _digest(manifest) != expected.manifest:
            return _REPLACED
        return f"its file {_METADATA} is damaged"

    def _warn(self, step: int, problem: str) -> None:
        """Say it, for the first steps that have a problem; ``passed_over`` has all of them."""
        text = f"step {step}: {problem}"
        if len(self._told) < _WARNINGS or text in self._told:
            self._tell(text)
        else:
            self._tell("further steps that cannot be used are not named one by one")

    def _tell(self, text: str) -> None:
        """Once for each text: the steps are looked at again and again."""
        if text not in self._told:
            self._told.add(text)
            logging.warning("%s in %s", text, self._directory)

    def _exists(self, below: str, deadline_s: float | None) -> bool:
        path: epath.Path = self._directory / below
        return self._storage.do("look at", f"/{below}", path.exists, deadline_s)

    def _plain(self, step: int, deadline_s: float | None) -> FoundStep | None:
        """Of the folders that may be this step, the first into which Orbax has written one."""
        junk: FoundStep | None = None
        for folder in self.folders.names_of(step):
            found = self._plain_in(folder, step, deadline_s)
            if found is not None and not found.is_junk:
                self.folders.choose(step, folder)
                return found
            junk = junk or found
        return junk

    def _plain_in(self, folder: str, step: int, deadline_s: float | None) -> FoundStep | None:
        if not self._is_finalized(folder, deadline_s):
            return None
        metadata = self._bytes(f"{folder}/{_METADATA}", deadline_s)
        if metadata is None and not self.folders.is_written_by_orbax(folder, deadline_s):
            return FoundStep(PersistentStep(step, 0, False, problem=_NO_STEP), None, is_junk=True)
        digest = hashlib.sha256(metadata or b"")
        for item in ("", *(f"{name}/" for name in ITEMS)):
            manifest = self._bytes(f"{folder}/{item}{_MANIFEST}", deadline_s)
            if manifest is not None:
                digest.update(manifest)
                break
        committed_ns = _fields(metadata).get("commit_timestamp_nsecs")
        committed_ms = committed_ns // 1_000_000 if isinstance(committed_ns, int) else 0
        incarnation = plain_incarnation(committed_ms, digest.hexdigest()[:16])
        doubt = self._signing.doubt(b"", None)
        problem = self._signing.objection(doubt)
        return FoundStep(PersistentStep(step, 0, False, incarnation, problem, doubt), None)

    def _is_written_here(self, step: int, deadline_s: float | None) -> bool:
        """Whether the tensors, if they are whole, are of a save of ours that did not end."""
        fields = _fields(self._bytes(f"{step}/{_METADATA}", deadline_s))
        if not fields:
            return True  # not whole, or so old that Orbax wrote no such file beside ours
        custom = fields.get("custom_metadata")
        return isinstance(custom, dict) and OURS in custom

    def is_replaced(self, step: int, deadline_s: float | None = None) -> bool:
        """Whether plain Orbax has written ``step``, beside which documents of ours lie."""
        found = self.look(step, deadline_s, is_ours=True)
        return found is not None and found.marker is None and not found.step.problem

    def _bytes(self, below: str, deadline_s: float | None) -> bytes | None:
        """Of a small file; None when it is not there."""
        path: epath.Path = self._directory / below

        def read() -> bytes | None:
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self._storage.do("read", f"/{below}", read, deadline_s)

    def _is_finalized(self, folder: str, deadline_s: float | None) -> bool:
        finalized = functools.partial(ocp.utils.is_checkpoint_finalized, self._directory / folder)
        try:
            return bool(self._storage.do("look at", f"/{folder}", finalized, deadline_s))
        except PersistentTierError as error:
            if isinstance(error.__cause__, ValueError):  # not a directory of Orbax
                return False
            raise


def _unreadable(step: int, reason: str) -> str:
    return (
        f"its marker {HOST_STATE}/{step}/{MARKER_NAME} cannot be read ({reason}); to take its"
        f" tensors as those of a step of plain Orbax, remove the folder {HOST_STATE}/{step}"
    )


def _digest(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _fields(metadata: bytes | None) -> dict[str, Any]:
    """Of Orbax's metadata; none when they cannot be read."""
    try:
        decoded = json.loads(metadata or b"{}")
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else {}
