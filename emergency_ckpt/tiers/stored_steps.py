"""Which steps a persistent directory has, and what each of them is worth."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from emergency_ckpt.core.inventory import PersistentStep, plain_incarnation
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.orbax_writing import ITEM, OURS
from emergency_ckpt.tiers.persistent_marker import (
    ASIDE_NAME,
    HOST_STATE,
    MARKER_NAME,
    StepMarker,
    TensorsId,
    decode_marker,
)
from emergency_ckpt.tiers.plain_orbax import ITEMS, StepFolders
from emergency_ckpt.tiers.storage_directory import StorageDirectory
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, decode_timeline

STEPS_LOOKED_AT = 16
"""So many of the newest steps are offered to a restore."""

_METADATA = "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_LOOKS_AT_ONCE = 8
_REPLACED = "another program has written it anew: it has tensors only"
_GONE = "its tensors are gone"


class FoundStep(NamedTuple):
    """A step that is there. ``marker``: None for one of plain Orbax, or with a ``problem``."""

    step: PersistentStep
    marker: StepMarker | None


class StoredSteps:
    """Looks at the steps of one directory. All methods block for storage, until their deadline.

    A step of ours has a marker that can be read, and the tensors that the marker was written for.
    Tensors that plain Orbax has written in their place are a step of plain Orbax, whatever lies
    beside them. A marker that cannot be read is a step that has a problem: it is there, and
    nobody can say what it is.

    Attributes:
      folders: the folder of each step, as it was listed last.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._directory = storage.path
        self.folders = StepFolders(storage)
        self._told: set[tuple[int, str]] = set()

    def newest(
        self, deadline_s: float | None = None, *, wanted: int | None = None
    ) -> list[PersistentStep]:
        """The newest steps that a restore may ask about, oldest first; and ``wanted``."""
        deadline_s = self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        newest = sorted(listed, reverse=True)
        found: list[PersistentStep] = []
        while newest and len(found) < STEPS_LOOKED_AT:
            some = newest[: STEPS_LOOKED_AT - len(found)]
            newest = newest[len(some) :]
            found += [each.step for each in self._look_at(some, listed, deadline_s)]
        if wanted in newest:
            found += [each.step for each in self._look_at([wanted], listed, deadline_s)]
        return sorted(found)

    def whole(self, deadline_s: float | None = None) -> list[PersistentStep]:
        """Every step of ours that is whole by what its marker says, oldest first."""
        deadline_s = self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        ours = [step for step in sorted(listed) if listed[step]]
        return [each.step for each in self._look_at(ours, listed, deadline_s) if each.marker]

    def all_there(self, deadline_s: float | None = None) -> list[PersistentStep]:
        """Every step that is there, of whatever kind and with whatever problem, oldest first."""
        deadline_s = self._storage.deadline_s(deadline_s)
        listed = self.listed(deadline_s)
        return [each.step for each in self._look_at(sorted(listed), listed, deadline_s)]

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
        with ThreadPoolExecutor(_LOOKS_AT_ONCE, "eckpt-steps") as pool:
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
            marker = self.marker(step, deadline_s)
        except CorruptData as error:
            self._warn(step, str(error))
            return FoundStep(PersistentStep(step, 0, False, problem=_unreadable(step)), None)
        except PersistentTierError as error:
            # Absent means not saved whole. Unreachable does not: then an older step must not be
            # taken for the newest.
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            written_here = self._is_written_here(step, deadline_s)
            return None if written_here else self._plain(step, deadline_s)
        return self._marked(step, marker, deadline_s)

    def _marked(self, step: int, marker: StepMarker, deadline_s: float | None) -> FoundStep | None:
        problem = ""
        if marker.tensors is not None:
            problem = self._compare_tensors(step, marker.tensors, deadline_s)
        if problem == _REPLACED:
            self._warn(step, problem)
            return self._plain(step, deadline_s)
        path = f"{HOST_STATE}/{step}/{MARKER_NAME}"
        if problem == _GONE and not self._exists(path, deadline_s):
            return None  # it is being removed
        if problem:
            self._warn(step, problem)
        found = PersistentStep(
            step,
            len(marker.digests),
            not all(marker.empty),
            incarnation=marker.save.incarnation,
            problem=problem,
        )
        return FoundStep(found, None if problem else marker)

    def marker(self, step: int, deadline_s: float | None = None) -> StepMarker:
        """The marker of ``step``; PersistentTierError without one, CorruptData."""
        path = self._directory / HOST_STATE / str(step) / MARKER_NAME
        below = f"/{HOST_STATE}/{step}/{MARKER_NAME}"
        data = self._storage.do("read", below, path.read_bytes, deadline_s)
        return decode_marker(data, step, str(path))

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
        """Once for each problem: the steps are looked at again and again."""
        if (step, problem) not in self._told:
            self._told.add((step, problem))
            logging.warning("step %d in %s: %s", step, self._directory, problem)

    def _exists(self, below: str, deadline_s: float | None) -> bool:
        path: epath.Path = self._directory / below
        return self._storage.do("look at", f"/{below}", path.exists, deadline_s)

    def _plain(self, step: int, deadline_s: float | None) -> FoundStep | None:
        if not self._is_finalized(step, deadline_s):
            return None
        folder = self.folders.of(step)
        metadata = self._bytes(f"{folder}/{_METADATA}", deadline_s)
        digest = hashlib.sha256(metadata or b"")
        for item in ("", *(f"{name}/" for name in ITEMS)):
            manifest = self._bytes(f"{folder}/{item}{_MANIFEST}", deadline_s)
            if manifest is not None:
                digest.update(manifest)
                break
        committed_ns = _fields(metadata).get("commit_timestamp_nsecs")
        committed_ms = committed_ns // 1_000_000 if isinstance(committed_ns, int) else 0
        incarnation = plain_incarnation(committed_ms, digest.hexdigest()[:16])
        return FoundStep(PersistentStep(step, 0, False, incarnation=incarnation), None)

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

    def _is_finalized(self, step: int, deadline_s: float | None) -> bool:
        path = self._directory / self.folders.of(step)
        finalized = functools.partial(ocp.utils.is_checkpoint_finalized, path)
        try:
            return bool(self._storage.do("look at", f"/{step}", finalized, deadline_s))
        except PersistentTierError as error:
            if isinstance(error.__cause__, ValueError):  # not a directory of Orbax
                return False
            raise


def _unreadable(step: int) -> str:
    return (
        f"its marker {HOST_STATE}/{step}/{MARKER_NAME} cannot be read; to take its tensors as those"
        f" of a step of plain Orbax, remove the folder {HOST_STATE}/{step}"
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
