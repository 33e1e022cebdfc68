"""The inspection of one step of a persistent directory: complete, damaged, or no step."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from absl import logging

from emergency_ckpt.core.limits import MAX_INT
from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.save.save_rules import named_metrics
from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.core.step_names import COMMITTED, MANIFEST, STEP_METADATA, is_item_name
from emergency_ckpt.core.timeline import is_same_save, plain_incarnation
from emergency_ckpt.errors import CorruptData, InvalidState, PersistentTierError
from emergency_ckpt.storage.calls import READ_AGAIN, read_twice
from emergency_ckpt.storage.directory import Generations, StorageDirectory
from emergency_ckpt.storage.marker import (
    HOST_STATE,
    MARKER_NAME,
    OURS,
    StepMarker,
    TensorsId,
    check_marker,
)
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE, ITEMS, StepFolders
from emergency_ckpt.types import SaveId

GONE = "its tensors are gone"
_WARNINGS = 16
_REPLACED = "another program has written it again"
_FOREIGN = "another program wrote it, and the step log does not name it"
_UNCOMMITTED = "it has no commit of Orbax's, as a step that was rolled back"
_UNMARKED = "it has neither a marker nor an entry in the step log"
_NO_STEP = "its folder has the name of a step, and Orbax has written nothing into it"


class FoundStep(NamedTuple):
    """A step that was inspected.

    Attributes:
      marker: None for a step of plain Orbax, or for a step with a ``problem``.
      folder: of the tensors.
      is_junk: neither this package nor Orbax wrote into the folder. The step has a ``problem``.
      committed_ns: Unix time in ns at which Orbax committed the step; 0 when not known.
      marker_digest: SHA-256 (hex) of ``marker.json``; empty without a ``marker``.
      metrics: of a step with a ``marker``, from Orbax's metadata; None without any.
      entry: the step's entry in the log; None for a step that the log does not name.
    """

    step: PersistentStep
    marker: StepMarker | None
    folder: str
    is_junk: bool = False
    committed_ns: int = 0
    marker_digest: str = ""
    metrics: dict[str, Any] | None = None
    entry: Entry | None = None

    @property
    def is_plain(self) -> bool:
        """Return True when plain Orbax wrote the step."""
        return self.marker is None and not self.step.problem

    def changed(self, **fields: Any) -> FoundStep:
        """Return this with other ``fields`` of ``step``."""
        return self._replace(step=msgspec.structs.replace(self.step, **fields))

    def as_foreign(self) -> FoundStep:
        """Return a step of plain Orbax with the problem that the log does not name the step."""
        return self.changed(problem=_FOREIGN, is_foreign=True)

    def as_unlisted(self) -> FoundStep:
        """Return a step of tensors only with the problem that the log does not name the step.

        If a life of this package hung in a save, and wrote the tensors after a newer life had
        cleared the rest, the step ends no restore.
        """
        return self.changed(problem=_UNMARKED) if self.step.tensors_of else self.as_foreign()


_Found = TypeVar("_Found", FoundStep, FoundStep | None)


class StepInspection:
    """Inspects the folders of steps. All methods block for storage.

    PersistentTierError when storage does not answer, or refuses: the step may be usable then.

    Args:
      logged: the texts that were logged; this object adds to them.
      number: the greatest incarnation of the log, for the incarnations of steps of plain Orbax.
      deadline_s: of ``time.monotonic``, for all calls; None: each call has its own.
    """

    def __init__(
        self, storage: StorageDirectory, logged: set[str], number: int, deadline_s: float | None
    ) -> None:
        self._storage = storage
        self._directory = storage.path
        self._logged = logged
        self._number = number
        self._deadline_s = deadline_s

    def listed(self, entry: Entry) -> FoundStep:
        """Return the step of a table's ``entry``, with a problem where it cannot be used.

        The tensors may be in the step's own folder or in the folder for the hidden step: Orbax's
        metadata name the incarnation of the tensors.
        """

        def look() -> FoundStep:
            stored_step = self._listed(entry)
            step = stored_step.step
            is_own = entry.incarnation in (step.incarnation, step.tensors_of)
            return stored_step.as_foreign() if stored_step.is_plain and not is_own else stored_step

        return self._confirmed(look)

    def _confirmed(self, look: Callable[[], _Found]) -> _Found:
        """Return the result of ``look``, called twice after a problem, as ``read_twice`` does."""
        first = look()
        if first is None or first.is_junk or not first.step.problem:
            return first
        second = look()
        if second is not None and second.step.problem:
            self._warn(second.step.step, second.step.problem)
        else:
            text = f"step {first.step.step}: {first.step.problem}"
            self.tell(f"{text}; {READ_AGAIN}")
        return second

    def _listed(self, entry: Entry) -> FoundStep:
        folders = [entry.own_folder]
        if not self._storage.is_object_store:
            # The likelier folder first. A crash may leave a hidden step before a version of the log
            # records that, and the newest version may be damaged.
            folders.insert(1 if entry.state == "complete" else 0, entry.hidden_folder)
        if entry.is_plain:
            return self._listed_plain(entry, folders)
        data = self._marker_of(entry.step)
        metadata, name = self._tensors_of(entry, folders)
        if data is None:
            return self._without_marker(entry, metadata, name)
        if _digest(data) != entry.marker:
            reason = "it is not the one that the step log names"
            return self._damaged(entry.step, entry.incarnation, name, reason)
        return self._marked(entry.step, data, {name: metadata})

    def _tensors_of(self, entry: Entry, folders: Sequence[str]) -> tuple[bytes | None, str]:
        """Return Orbax's metadata of the entry's tensors, and their folder; else its own folder."""
        own: bytes | None = None
        for folder in folders:
            data = self._metadata_of(folder)
            if _incarnation_of(data) == entry.incarnation:
                return data, folder
            own = data if folder == entry.own_folder else own
        return own, entry.own_folder

    def _without_marker(self, entry: Entry, metadata: bytes | None, folder: str) -> FoundStep:
        if metadata is None:
            return self._problem(entry.step, entry.incarnation, GONE, folder)
        is_own = _incarnation_of(metadata) == entry.incarnation
        if is_own and self._has_documents(entry.step):
            return self._damaged(entry.step, entry.incarnation, folder, "it is gone")
        # Without our folder the step has tensors only.
        stored_step = self._plain_in(folder, entry.step)
        if stored_step is None:
            return self._problem(entry.step, entry.incarnation, GONE, folder)
        if stored_step.is_junk or fields_of(metadata):
            return stored_step
        # Unreadable metadata do not name the writer of the step; the entry does.
        return stored_step.changed(tensors_of=entry.incarnation)

    def _listed_plain(self, entry: Entry, folders: Sequence[str]) -> FoundStep:
        again = self._problem(entry.step, entry.incarnation, GONE, entry.own_folder)
        for folder in folders:
            stored_step = self._plain_in(folder, entry.step, is_hidden=entry.state == "hidden")
            if stored_step is None or stored_step.is_junk:
                continue
            if is_same_save(stored_step.step.incarnation, entry.incarnation):
                # The incarnation's number is of the time at which the step was first seen.
                return stored_step.changed(incarnation=entry.incarnation)
            if folder == entry.own_folder and entry.state == "complete":
                again = stored_step  # plain Orbax has written the step again
        return again

    def unlisted(self, step: int, names: Sequence[str]) -> FoundStep | None:
        """Return the step in folders that no table names; None for a step that does not count.

        A step of this package needs both markers, as after a copy by hand. ``names``: the folders
        that may be the step's, in order of preference.
        """
        return self._confirmed(lambda: self._unlisted(step, names))

    def _unlisted(self, step: int, names: Sequence[str]) -> FoundStep | None:
        data = self._marker_of(step)
        metadata_by_name = {name: self._metadata_of(name) for name in names}
        if data is not None:
            marked = self._marked(step, data, metadata_by_name)
            is_whole = marked.marker is None or self.is_committed(marked.folder)
            return (
                marked if is_whole else marked.changed(problem=_UNCOMMITTED)._replace(marker=None)
            )
        # Of two folders, the documents belong to the folder that this package wrote.
        names = sorted(names, key=lambda name: ours_of(metadata_by_name[name]) is None)
        # Metadata without fields are damaged, or of an old version of Orbax without such a file.
        metadata = metadata_by_name[names[0]]
        may_be_ours = not fields_of(metadata) or ours_of(metadata) is not None
        if may_be_ours and self._has_documents(step):
            return None
        junk: FoundStep | None = None
        for folder in names:
            stored_step = self._plain_in(folder, step)
            if stored_step is not None and not stored_step.is_junk:
                return stored_step
            junk = junk or stored_step
        return junk

    def is_begun_by_us(self, names: Iterable[str]) -> bool:
        """Return whether this package began the save of a step in one of its folders ``names``."""
        return any(ours_of(self._metadata_of(name)) is not None for name in names)

    def is_of_a_save(self, name: str) -> bool:
        """Return whether a file system has a folder that a save of this package wrote.

        Such a save writes under another name, and renames the whole folder to ``name``. An empty
        folder counts too, because nobody loses anything with such a folder.
        """
        is_ours, _ = self._writer_of(name)
        if is_ours is not None:
            return is_ours
        is_folder = (self._directory / name).is_dir
        if not self._storage.do("inspect", f"/{name}", is_folder, self._deadline_s):
            return False
        return not self._storage.names_in(name, self._deadline_s)

    def of_a_save(self, objects: Generations, items: Iterable[str] = ()) -> Generations:
        """Return the documents among a bucket's ``objects``, and what a save wrote beside these.

        Other programs write there too, at any time. Orbax's metadata are the first file of a save,
        and leave with the last one: so a folder without them, or with those of another program, has
        nothing of a save. ``items``: which a write that ended late has put there all the same.
        ``objects`` were listed before, so that the metadata are no older.
        """
        kept: Generations = {}
        for folder, names in itertools.groupby(sorted(objects), lambda name: name.split("/")[0]):
            mine = None if folder == HOST_STATE else self._parts_of_a_save(folder, items)
            kept |= {n: objects[n] for n in names if mine is None or n.split("/")[1] in mine}
        return kept

    def _parts_of_a_save(self, folder: str, items: Iterable[str]) -> set[str] | None:
        """Return the names that a save wrote into ``folder``; None when all may be of a save."""
        is_ours, metadata = self._writer_of(folder)
        if is_ours is None:
            return set(items)
        if not is_ours:
            return set()
        # Damaged metadata do not name the items.
        return {STEP_METADATA, COMMITTED, *items_of(metadata)} if fields_of(metadata) else None

    def _writer_of(self, folder: str) -> tuple[bool | None, bytes | None]:
        """Return whether a save of this package began in ``folder``, and Orbax's metadata there.

        None without metadata, which alone show it. Unreadable ones count as damaged ones of ours.
        """
        metadata = self._sure_metadata_of(folder)
        if metadata is None:
            return None, None
        return not fields_of(metadata) or ours_of(metadata) is not None, metadata

    def is_in_own_folder(self, entry: Entry) -> bool:
        """Return whether the files of ``entry`` are in the folder of a complete step.

        The metadata of the step may be damaged. Then the marker identifies the manifest. Without a
        marker too, unreadable metadata count as the entry's own, unless a hidden folder exists.
        """
        if entry.is_plain:
            stored_step = self.listed(entry)
            return not stored_step.step.problem and stored_step.folder == entry.own_folder
        metadata = self._sure_metadata_of(entry.own_folder)
        if _incarnation_of(metadata) == entry.incarnation:
            return True
        data = self._marker_of(entry.step)
        if data is not None and _digest(data) == entry.marker:
            marker = check_marker(data, entry.step, _marker_path(entry.step))
            problem = self._compare_tensors(entry.own_folder, metadata, marker)
            if problem not in (GONE, _REPLACED):
                return True
        storage = self._storage
        is_elsewhere = not storage.is_object_store and storage.lexists(entry.hidden_folder)
        return metadata is not None and not fields_of(metadata) and not is_elsewhere

    def marked(self, step: int) -> SaveId | None:
        """Return the save that the marker of ``step`` names; None without one that counts."""

        def read() -> SaveId | None:
            data = self._marker_of(step)
            return None if data is None else check_marker(data, step, _marker_path(step)).save

        try:
            return read_twice(read)
        except CorruptData:
            return None

    def is_committed(self, folder: str) -> bool:
        """Return whether Orbax's commit is there; on a file system the folder's name is the commit.

        A hidden step in a bucket has none, and a lost log tells no more that the step is hidden.
        """
        commit = f"{folder}/{COMMITTED}"
        return not self._storage.is_object_store or self._storage.has_file(commit, self._deadline_s)

    def _has_documents(self, step: int) -> bool:
        return bool(self._storage.names_in(f"{HOST_STATE}/{step}", self._deadline_s))

    def _marker_of(self, step: int) -> bytes | None:
        return self._storage.bytes_of(_marker_path(step), self._deadline_s)

    def _metadata_of(self, name: str) -> bytes | None:
        return self._storage.bytes_of(f"{name}/{STEP_METADATA}", self._deadline_s)

    def _sure_metadata_of(self, name: str) -> bytes | None:
        """Return Orbax's metadata in a folder; unreadable ones were read twice."""
        metadata = self._metadata_of(name)
        is_readable = metadata is None or fields_of(metadata)
        return metadata if is_readable else self._metadata_of(name)

    def _marked(self, step: int, data: bytes, tensors: Mapping[str, bytes | None]) -> FoundStep:
        """Return the step of a marker. ``tensors``: Orbax's metadata by folder, likeliest first."""
        path = f"{self._directory}/{_marker_path(step)}"
        name = next(iter(tensors))
        try:
            marker = check_marker(data, step, path)
        except CorruptData as error:
            return self._damaged(step, "", name, error.problem)
        its = (folder for folder in tensors if _digest(tensors[folder]) == marker.tensors.metadata)
        name = next(its, name)
        metadata = tensors[name]
        problem = self._compare_tensors(name, metadata, marker)
        if problem == _REPLACED:
            self._warn(step, problem)
            stored_step = self._plain_in(name, step)
            return stored_step or self._problem(step, marker.save.incarnation, GONE, name)
        stateful, incarnation = not all(marker.empty), marker.save.incarnation
        item = PersistentStep(step, len(marker.digests), stateful, incarnation, problem)
        usable = None if problem else marker
        return FoundStep(
            item,
            usable,
            name,
            committed_ns=_committed_ns(metadata),
            marker_digest=_digest(data),
            metrics=_metrics_of(metadata),
        )

    def _compare_tensors(self, folder: str, metadata: bytes | None, marker: StepMarker) -> str:
        """Return the reason why the tensors are not the marker's, or "".

        If only the metadata's digest differs, the metadata file is damaged.
        """
        if _digest(metadata) == marker.tensors.metadata:
            return ""
        names = _manifests(folder, marker.items)
        manifest = _together(self._storage.bytes_of(name, self._deadline_s) for name in names)
        if metadata is None and manifest is None:
            return GONE
        if _digest(manifest) != marker.tensors.manifest:
            return _REPLACED
        return f"its file {STEP_METADATA} is damaged"

    def _damaged(self, step: int, incarnation: str, folder: str, reason: str) -> FoundStep:
        problem = (
            f"its marker {_marker_path(step)} cannot be used ({reason}); to take its tensors alone,"
            f" remove the folder {HOST_STATE}/{step} and call restore without host_state"
        )
        return self._problem(step, incarnation, problem, folder)

    @staticmethod
    def _problem(step: int, incarnation: str, problem: str, folder: str) -> FoundStep:
        item = PersistentStep(step, 0, False, incarnation=incarnation, problem=problem)
        return FoundStep(item, None, folder)

    def tensors_id(self, save: SaveId, items: Sequence[str]) -> TensorsId:
        """Return the identity of the tensors of ``items`` in the step's own place.

        PersistentTierError when another save has written the tensors.
        """
        name = self._storage.name_of(save.step)
        names = (f"{name}/{STEP_METADATA}", *_manifests(name, items))
        deadline_s = self._storage.deadline_s(self._deadline_s)
        read = functools.partial(self._storage.bytes_of, deadline_s=deadline_s)
        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-tensors") as pool:
            metadata, *manifests = pool.map(read, names)
        writer = _incarnation_of(metadata)
        if writer not in (None, save.incarnation):
            problem = f"incarnation {writer} has written it meanwhile"
            raise PersistentTierError("publish", f"{self._directory}/{name}", problem)
        return TensorsId(_digest(metadata), _digest(_together(manifests)))

    def _warn(self, step: int, problem: str) -> None:
        """Log the problems of the first few steps; the restore's rejections have all problems."""
        text = f"step {step}: {problem}"
        if len(self._logged) < _WARNINGS or text in self._logged:
            self.tell(text)
        else:
            self.tell("further steps that cannot be used are not logged one by one")

    def tell(self, text: str) -> None:
        """Log each text once, because the steps are inspected often."""
        if text not in self._logged:
            self._logged.add(text)
            logging.warning("%s in %s", text, self._directory)

    def _plain_in(self, folder: str, step: int, *, is_hidden: bool = False) -> FoundStep | None:
        # A hidden step in a bucket has no commit marker.
        if not is_hidden and not self._is_finalized(folder):
            return None
        metadata = self._metadata_of(folder)
        is_described = bool(fields_of(metadata))
        if not is_described and not StepFolders(self._storage, self._deadline_s).has_items(folder):
            if is_hidden:
                return None
            problem = PersistentStep(step, 0, False, problem=_NO_STEP)
            return FoundStep(problem, None, folder, is_junk=True)
        digest = hashlib.sha256(metadata or b"")
        for item in ("", *(f"{name}/" for name in ITEMS)):
            manifest = self._storage.bytes_of(f"{folder}/{item}{MANIFEST}", self._deadline_s)
            if manifest is not None:
                digest.update(manifest)
                break
        incarnation = plain_incarnation(self._number, digest.hexdigest()[:16])
        saved = _incarnation_of(metadata)
        tensors_of = saved if isinstance(saved, str) else ""
        plain_step = PersistentStep(step, 0, False, incarnation, tensors_of=tensors_of)
        return FoundStep(plain_step, None, folder, committed_ns=_committed_ns(metadata))

    def _is_finalized(self, folder: str) -> bool:
        # Imported here: the import takes a second, and a list of this package's steps needs none.
        from orbax.checkpoint.utils import is_checkpoint_finalized  # noqa: PLC0415

        def is_finalized() -> bool:
            try:
                return bool(is_checkpoint_finalized(self._directory / folder))
            except (ValueError, FileNotFoundError, NotADirectoryError):
                return False  # not a directory of Orbax, which no retry makes one

        return self._storage.do("inspect", f"/{folder}", is_finalized, self._deadline_s)


def _marker_path(step: int) -> str:
    return f"{HOST_STATE}/{step}/{MARKER_NAME}"


def _digest(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _manifests(folder: str, items: Iterable[str]) -> list[str]:
    return [f"{folder}/{item}/{MANIFEST}" for item in sorted(items)]


def _together(files: Iterable[bytes | None]) -> bytes | None:
    """Return the bytes of all files that exist, joined; None where no file exists."""
    contents = [data for data in files if data is not None]
    return b"".join(contents) if contents else None


def items_of(metadata: bytes | None) -> tuple[str, ...]:
    """Return the names of all items of a step of this package, from Orbax's metadata."""
    handlers = fields_of(metadata).get("item_handlers")
    names = cast("dict[str, Any]", handlers) if isinstance(handlers, dict) else ()
    return tuple(filter(is_item_name, names))


_FIELDS = {"item_handlers", "init_timestamp_nsecs", "commit_timestamp_nsecs", "custom_metadata"}
"""Fields of Orbax's metadata, which have all the fields that the version of Orbax knows.
https://github.com/google/orbax: checkpoint/_src/metadata/step_metadata_serialization.py"""


def fields_of(metadata: bytes | None) -> dict[str, Any]:
    """Return the fields of Orbax's metadata; none when they cannot be read, or are not Orbax's."""
    try:
        decoded = json.loads(metadata or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(decoded, dict) or not _FIELDS & decoded.keys():
        return {}
    return cast("dict[str, Any]", decoded)


def ours_of(metadata: bytes | None) -> dict[str, Any] | None:
    """Return this package's entry in Orbax's metadata; None when this package wrote no entry."""
    custom = fields_of(metadata).get("custom_metadata")
    if not isinstance(custom, dict) or OURS not in custom:
        return None
    ours = cast("dict[str, Any]", custom)[OURS]
    return cast("dict[str, Any]", ours) if isinstance(ours, dict) else {}


def _incarnation_of(metadata: bytes | None) -> object:
    """Return the incarnation that this package's entry names, unchecked; None without one."""
    return (ours_of(metadata) or {}).get("incarnation")


def _metrics_of(metadata: bytes | None) -> dict[str, Any] | None:
    """Return the metrics in Orbax's metadata; None without any, or where no save takes them."""
    try:
        return named_metrics(fields_of(metadata).get("metrics")) or None
    except InvalidState:
        return None


def _committed_ns(metadata: bytes | None) -> int:
    """Return the time of the commit; 0 for a number that is no time, which anybody may write."""
    commit_ns = fields_of(metadata).get("commit_timestamp_nsecs")
    return commit_ns if isinstance(commit_ns, int) and 0 <= commit_ns <= MAX_INT else 0
