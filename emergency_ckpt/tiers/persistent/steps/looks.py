"""The inspection of one step of a persistent directory: whole, damaged, or no step."""

from __future__ import annotations

import functools
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

from absl import logging

from emergency_ckpt.core.limits import MAX_MARKER_BYTES
from emergency_ckpt.core.restore.inventory import PersistentStep, plain_incarnation
from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.persistent.marker import (
    HOST_STATE,
    ITEM,
    MARKER_NAME,
    OURS,
    StepMarker,
    TensorsId,
    check_marker,
)
from emergency_ckpt.tiers.persistent.orbax_names import MANIFEST, STEP_METADATA
from emergency_ckpt.tiers.persistent.steps.folders import ITEMS, StepFolders
from emergency_ckpt.tiers.persistent.steps.replaced import StepPlace
from emergency_ckpt.tiers.storage.directory import StorageDirectory
from emergency_ckpt.types import SaveId

_WARNINGS = 16
_REPLACED = "another program has written it again: it has tensors only"
_GONE = "its tensors are gone"
_NO_STEP = "its folder has the name of a step, and Orbax has written nothing into it"


class FoundStep(NamedTuple):
    """A step that was found.

    Attributes:
      marker: None for a step of plain Orbax, or one with a ``problem``.
      place: its folders.
      is_junk: neither this package nor Orbax wrote into its folder. It has a ``problem``.
      committed_ns: Unix time in ns at which Orbax committed it; 0 when that is not known.
    """

    step: PersistentStep
    marker: StepMarker | None
    place: StepPlace
    is_junk: bool = False
    committed_ns: int = 0

    @property
    def is_plain(self) -> bool:
        """Return True when plain Orbax wrote it."""
        return self.marker is None and not self.step.problem


class StepLooks:
    """Inspects the folders of a step. All methods block for storage, until their deadline."""

    def __init__(
        self, storage: StorageDirectory, folders: StepFolders, signing: StepSigning
    ) -> None:
        self._storage = storage
        self._directory = storage.path
        self._folders = folders
        self._signing = signing
        self._told: set[str] = set()

    def ours(self, step: int, place: StepPlace, deadline_s: float | None) -> FoundStep | None:
        """Return the step that has a folder of ours, or None when it does not count."""
        try:
            marker, doubt = self.marker(step, place.documents, deadline_s)
        except CorruptData as error:
            self._warn(step, str(error))
            problem = _unreadable(place, error.problem)
            return FoundStep(PersistentStep(step, 0, False, problem=problem), None, place)
        except PersistentTierError as error:
            # An absent marker means an unfinished save. An unreachable one does not, so that no
            # older step is taken for the newest.
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            written_here = self._is_written_here(place, deadline_s)
            return None if written_here else self.plain(step, place, deadline_s)
        return self._marked(step, marker, doubt, place, deadline_s)

    def _marked(
        self,
        step: int,
        marker: StepMarker,
        doubt: str,
        place: StepPlace,
        deadline_s: float | None,
    ) -> FoundStep | None:
        problem = ""
        metadata = self._storage.bytes_of(f"{place.tensors}/{STEP_METADATA}", deadline_s)
        if marker.tensors is not None:
            problem = self._compare_tensors(place, metadata, marker.tensors, deadline_s)
        elif not self._folders.is_written_by_orbax(place.tensors, deadline_s):
            problem = _GONE
        if problem == _REPLACED:
            self._warn(step, problem)
            return self.plain(step, place, deadline_s)
        path = f"{HOST_STATE}/{place.documents}/{MARKER_NAME}"
        if problem == _GONE and not self.exists(path, deadline_s):
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
        usable = None if problem else marker
        return FoundStep(found, usable, place, committed_ns=_committed_ns(metadata))

    def marker(
        self, step: int, documents: str, deadline_s: float | None = None
    ) -> tuple[StepMarker, str]:
        """Return the marker of ``step`` and the reason not to trust it, or "".

        PersistentTierError without a marker, CorruptData.
        """
        path = self._directory / HOST_STATE / documents / MARKER_NAME
        below = f"/{HOST_STATE}/{documents}/{MARKER_NAME}"
        data = self._storage.read_bounded(path, below, MAX_MARKER_BYTES, deadline_s)
        return check_marker(data, step, str(path), self._signing)

    def tensors_id(self, save: SaveId, deadline_s: float | None = None) -> TensorsId:
        """Return the identity of the tensors in the step's own place.

        PersistentTierError when another save has written them.
        """
        names = (f"{save.step}/{STEP_METADATA}", f"{save.step}/{ITEM}/{MANIFEST}")
        deadline_s = self._storage.deadline_s(deadline_s)
        read = functools.partial(self._storage.bytes_of, deadline_s=deadline_s)
        with ThreadPoolExecutor(len(names), "eckpt-tensors") as pool:
            metadata, manifest = pool.map(read, names)
        writer = (_ours(metadata) or {}).get("incarnation")
        if writer not in (None, save.incarnation):
            problem = f"incarnation {writer} has written it meanwhile"
            raise PersistentTierError("publish", f"{self._directory}/{save.step}", problem)
        return TensorsId(_digest(metadata), _digest(manifest))

    def _compare_tensors(
        self,
        place: StepPlace,
        metadata: bytes | None,
        expected: TensorsId,
        deadline_s: float | None,
    ) -> str:
        """Return the reason why the tensors are not the marker's, or "". One digest may differ
        because its file is damaged."""
        if _digest(metadata) == expected.metadata:
            return ""
        manifest = self._storage.bytes_of(f"{place.tensors}/{ITEM}/{MANIFEST}", deadline_s)
        if metadata is None and manifest is None:
            return _GONE
        if _digest(manifest) != expected.manifest:
            return _REPLACED
        return f"its file {STEP_METADATA} is damaged"

    def _warn(self, step: int, problem: str) -> None:
        """Log the problem of the first few steps; ``passed_over`` has all of them."""
        text = f"step {step}: {problem}"
        if len(self._told) < _WARNINGS or text in self._told:
            self.tell(text)
        else:
            self.tell("further steps that cannot be used are not logged one by one")

    def tell(self, text: str) -> None:
        """Log each text once, because the steps are inspected often."""
        if text not in self._told:
            self._told.add(text)
            logging.warning("%s in %s", text, self._directory)

    def exists(self, below: str, deadline_s: float | None) -> bool:
        """Return True when the file ``below`` the directory exists. Blocks."""
        return self._storage.has_file(below, deadline_s)

    def plain(self, step: int, place: StepPlace, deadline_s: float | None) -> FoundStep | None:
        """Return the step of plain Orbax: of its possible folders the first that Orbax wrote."""
        if place.is_aside:
            return self._plain_in(place, step, deadline_s)
        junk: FoundStep | None = None
        for folder in self._folders.names_of(step):
            found = self._plain_in(StepPlace(folder, str(step)), step, deadline_s)
            if found is not None and not found.is_junk:
                self._folders.choose(step, folder)
                return found
            junk = junk or found
        return junk

    def _plain_in(self, place: StepPlace, step: int, deadline_s: float | None) -> FoundStep | None:
        folder = place.tensors
        if not self._is_finalized(folder, deadline_s):
            return None
        metadata = self._storage.bytes_of(f"{folder}/{STEP_METADATA}", deadline_s)
        if metadata is None and not self._folders.is_written_by_orbax(folder, deadline_s):
            problem = PersistentStep(step, 0, False, problem=_NO_STEP)
            return FoundStep(problem, None, place, is_junk=True)
        digest = hashlib.sha256(metadata or b"")
        for item in ("", *(f"{name}/" for name in ITEMS)):
            manifest = self._storage.bytes_of(f"{folder}/{item}{MANIFEST}", deadline_s)
            if manifest is not None:
                digest.update(manifest)
                break
        committed_ns = _committed_ns(metadata)
        incarnation = plain_incarnation(0, digest.hexdigest()[:16])
        doubt = self._signing.doubt(b"", None)
        problem = self._signing.objection(doubt)
        ours = _ours(metadata) or {}
        saved = ours.get("incarnation")
        tensors_of = saved if isinstance(saved, str) else ""
        found = PersistentStep(step, 0, False, incarnation, problem, doubt, tensors_of)
        return FoundStep(found, None, place, committed_ns=committed_ns)

    def _is_written_here(self, place: StepPlace, deadline_s: float | None) -> bool:
        """Return True when the tensors, if whole, are of an unfinished save of this package."""
        metadata = self._storage.bytes_of(f"{place.tensors}/{STEP_METADATA}", deadline_s)
        # No fields: not whole, or of an old version of Orbax without such a file.
        return not _fields(metadata) or _ours(metadata) is not None

    def _is_finalized(self, folder: str, deadline_s: float | None) -> bool:
        # Imported here: it takes a second, and a list of this package's steps does without it.
        from orbax.checkpoint.utils import is_checkpoint_finalized  # noqa: PLC0415

        finalized = functools.partial(is_checkpoint_finalized, self._directory / folder)
        try:
            return bool(self._storage.do("look at", f"/{folder}", finalized, deadline_s))
        except PersistentTierError as error:
            if isinstance(error.__cause__, ValueError):  # not a directory of Orbax
                return False
            raise


def _unreadable(place: StepPlace, reason: str) -> str:
    documents = f"{HOST_STATE}/{place.documents}"
    return (
        f"its marker {documents}/{MARKER_NAME} cannot be read ({reason}); to take its"
        f" tensors as those of a step of plain Orbax, remove the folder {documents}"
    )


def _digest(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _fields(metadata: bytes | None) -> dict[str, Any]:
    """Return the fields of Orbax's metadata; none when they cannot be read."""
    try:
        decoded = json.loads(metadata or b"{}")
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else {}


def _ours(metadata: bytes | None) -> dict[str, Any] | None:
    """Return what this package wrote into Orbax's metadata; None when it did not write them."""
    custom = _fields(metadata).get("custom_metadata")
    if not isinstance(custom, dict) or OURS not in custom:
        return None
    ours = cast("dict[str, Any]", custom)[OURS]
    return cast("dict[str, Any]", ours) if isinstance(ours, dict) else {}


def _committed_ns(metadata: bytes | None) -> int:
    found = _fields(metadata).get("commit_timestamp_nsecs")
    return found if isinstance(found, int) else 0
