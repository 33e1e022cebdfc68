"""A directory of the persistent tier, on a file system or in an object store, with deadlines.

``probe_storage`` writes, reads back and removes a small file in it; ``storage_time_s`` asks for the
time of one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from etils import epath

from emergency_ckpt.core.limits import MAX_MARKER_BYTES
from emergency_ckpt.core.step_names import is_own_name, name_of
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptData,
    InvalidState,
    PersistentTierError,
)
from emergency_ckpt.files import closing, file_size_hint
from emergency_ckpt.paths import resolved
from emergency_ckpt.storage.calls import (
    LATE_CHANGES,
    StorageTimeout,
    call,
    call_with_retries,
    errno_of,
    is_conflict,
    is_damage,
    is_passing,
    is_refusal,
    is_unreachable,
)
from emergency_ckpt.storage.marker import HOST_STATE
from emergency_ckpt.work_progress import WorkProgress

_T = TypeVar("_T")

Generations = dict[str, str]
"""Objects of an object store by their names below a directory, each with its generation: a number
that each write of an object creates anew."""

_OBJECTS_AT_ONCE = 64
_DAMAGED_HINT = "the step cannot be read in full; use another one"
_UNSATISFIABLE = 416
_HAS_FOLDERS: dict[str, bool] = {}
"""For each bucket that this process has found to keep preconditions: whether the bucket has a
hierarchical namespace."""

_STALLED_S = 5.0
"""After this time a read of a small file is begun once more: most reads take tens of ms."""


class StorageDirectory:
    """Calls to one directory. All block, at most until ``deadline_s`` of ``time.monotonic``.

    The default is ``timeout_s`` seconds from the call. A failure is a PersistentTierError,
    ``retryable`` when storage was only slow or overloaded.

    Attributes:
      path: the directory, resolved.
      is_object_store: True when files appear at the end of their upload and cannot be renamed.
      step_name: the format of the names of new steps, as its name of step 0.
    """

    def __init__(self, directory: str, timeout_s: float, step_name: str = "0") -> None:
        self.path = epath.Path(resolved(directory))
        self.is_object_store = "://" in str(self.path)
        self.timeout_s = timeout_s
        self.step_name = step_name
        self._scheme, _, place = str(self.path).partition("://")
        self._bucket, _, root = place.partition("/")
        self._below = f"{root}/" if root else ""  # of an object's name, before that below ``path``
        self._is_gcs = directory.startswith("gs://")
        if self._is_gcs and find_spec("gcsfs") is None:
            problem = "gs:// needs gcsfs, which is not installed; pip install 'emergency-ckpt[gcs]'"
            raise ConfigError([problem], target=directory)

    def name_of(self, step: int) -> str:
        """Return the name of the folder into which ``step`` is written."""
        return name_of(step, self.step_name)

    def create(self, deadline_s: float | None = None) -> None:
        """Make the directory; for a bucket, only check that it exists."""

        def make() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_bucket()

        self.do("create", "", make, deadline_s)

    def create_folder(self, below: str, deadline_s: float | None = None) -> None:
        """Make the folder ``below`` and its parents on a file system; a bucket needs no folders.

        Other methods make no parents of their file's folder: if a file system was unmounted, the
        directory must not be begun anew at the place where the file system was.
        """
        if not self.is_object_store:
            make = partial((self.path / below).mkdir, parents=True, exist_ok=True)
            self.do("create", f"/{below}", make, deadline_s)

    def check_bucket(self, deadline_s: float | None = None) -> None:
        """Raise PersistentTierError without a bucket; a missing folder looks like an empty one."""
        self.do("list", "", self._check_bucket, deadline_s)

    def _check_bucket(self) -> None:
        if self.is_object_store and not epath.Path(f"{self._scheme}://{self._bucket}").exists():
            raise FileNotFoundError(f"bucket {self._bucket!r} does not exist")

    def _refuse_zonal(self) -> None:
        """Raise PersistentTierError in a zonal bucket; one request per process and bucket.

        There objects are visible before they are finished, and a precondition that an object does
        not exist is not enforced: if two lives write one version of the log, both go on.
        https://cloud.google.com/storage/docs/rapid/rapid-bucket
        """
        try:
            layout = self._client().call("GET", "b/{}/storageLayout", self._bucket, json_out=True)
        except Exception as error:
            if not (is_refusal(error) or isinstance(error, FileNotFoundError)):
                raise
            layout = dict[str, Any]()  # a missing right shows at the next call
        if layout.get("locationType") == "zone":
            problem = f"bucket {self._bucket!r} is zonal (Rapid): it does not keep preconditions"
            hint = "use a regional or multi-region bucket; Rapid Cache makes its reads as fast"
            raise PersistentTierError("use", str(self.path), problem, hint=hint)
        namespace = layout.get("hierarchicalNamespace") or {}
        _HAS_FOLDERS[self._bucket] = bool(namespace.get("enabled"))

    def names_in(self, below: str = "", deadline_s: float | None = None) -> set[str]:
        """Return the names in the folder ``below``; none when there is no such folder.

        A file in the folder's place has no names: a write there fails with that error.
        """

        def names() -> set[str]:
            if self._is_gcs:
                return self._names_of_objects(f"{below}/" if below else "")
            self.forget_listings()
            try:
                return {path.name for path in (self.path / below).iterdir()}
            except FileNotFoundError:
                return set()
            except NotADirectoryError:
                if not below:
                    raise
                return set()

        return self.do("list", "", names, deadline_s)

    def numbers_in(self, below: str = "", deadline_s: float | None = None) -> set[int]:
        """Return the numbers that are names in the folder ``below``, without padded numbers."""
        return {int(name) for name in self.names_in(below, deadline_s) if is_own_name(name)}

    def forget_listings(self) -> None:
        """Clear the client's cache of listings, which misses later writes of other processes."""
        if self.is_object_store:
            self._client().invalidate_cache()

    def _client(self) -> Any:
        """Return the fsspec client of an object store."""
        return _client_of(self._scheme)

    def objects_with(self, *prefixes: str) -> Generations:
        """Return the objects whose names begin with one of ``prefixes``. For use inside ``do``."""
        objects: Generations = {}
        for prefix in prefixes:
            for page in self._pages(prefix):
                for item in page.get("items", ()):
                    objects[item["name"].removeprefix(self._below)] = item["generation"]
        return objects

    def _names_of_objects(self, prefix: str) -> set[str]:
        below = f"{self._below}{prefix}"
        names: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # there is no such bucket
            for page in self._pages(prefix, delimiter="/"):
                names.update(item["name"].removeprefix(below) for item in page.get("items", ()))
                names.update(folder.removeprefix(below)[:-1] for folder in page.get("prefixes", ()))
        return names - {""}  # an object whose name ends with a slash stands for a folder

    def _pages(self, prefix: str, **query: str) -> Generator[dict[str, Any]]:
        """List objects of a bucket whose names below the directory begin with ``prefix``.

        In a bucket with a hierarchical namespace the client's own listings also have folders, even
        the empty folders that removed steps leave.
        https://cloud.google.com/storage/docs/json_api/v1/objects/list
        """
        query |= {"prefix": f"{self._below}{prefix}", "maxResults": "1000"}
        while True:
            page = self._client().call("GET", "b/{}/o", self._bucket, json_out=True, **query)
            yield page
            if "nextPageToken" not in page:
                return
            query["pageToken"] = page["nextPageToken"]

    def delete_objects(self, objects: Generations) -> None:
        """Delete objects that still have these generations. Idempotent. For use inside ``do``."""
        client = self._client()

        def delete(name: str, generation: str) -> None:
            # Absent, or of another generation: the caller's object is deleted.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                path = "b/{}/o/{}", self._bucket, f"{self._below}{name}"
                client.call("DELETE", *path, ifGenerationMatch=generation)

        try:
            with ThreadPoolExecutor(_OBJECTS_AT_ONCE, "eckpt-objects") as pool:
                list(pool.map(delete, objects.keys(), objects.values()))
        finally:
            self.forget_listings()

    def delete_empty_folders(self, names: Iterable[str]) -> None:
        """Delete the folders of objects that were deleted, where nothing else is in them.

        Only a bucket with a hierarchical namespace has such folders. A folder that storage refuses
        to delete stays, and does no harm: no listing here has it. For use inside ``do``.
        https://cloud.google.com/storage/docs/json_api/v1/folders/delete
        """
        if not _HAS_FOLDERS.get(self._bucket):
            return
        client = self._client()
        above = {parent for name in names for parent in PurePosixPath(name).parents if parent.name}
        for folder in sorted(above, key=lambda path: len(path.parts), reverse=True):
            try:
                client.call("DELETE", "b/{}/folders/{}", self._bucket, f"{self._below}{folder}/")
            except Exception as error:
                if not (is_refusal(error) or is_conflict(error)):
                    raise

    def bytes_of(self, below: str, deadline_s: float | None = None) -> bytes | None:
        """Return the bytes of a small file, or None when the file does not exist.

        Of an overlong file the result is the beginning, which every digest or decoder refuses.
        """
        path = self.path / below

        def read() -> bytes | None:
            try:
                return read_at_most(path, MAX_MARKER_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.do("read", f"/{below}", read, deadline_s)

    def has_file(self, below: str, deadline_s: float | None = None) -> bool:
        """Return True when the file ``below`` exists."""
        look = partial(is_there, self.path / below)
        return self.do("inspect", f"/{below}", look, deadline_s)

    def changed_s(self, below: str, deadline_s: float | None = None) -> float | None:
        """Return the Unix time of the last change of an entry, by the clock of storage.

        A folder of a file system that gets another name is changed too. None without the entry.
        """

        def look() -> float | None:
            try:
                if self.is_object_store:
                    path = "b/{}/o/{}", self._bucket, f"{self._below}{below}"
                    updated = self._client().call("GET", *path, json_out=True).get("updated")
                    return updated and datetime.fromisoformat(updated).timestamp()
                status = os.stat(self.path / below, follow_symlinks=False)
                return max(status.st_ctime, status.st_mtime)
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.do("inspect", f"/{below}", look, deadline_s)

    def read_bounded(
        self, path: epath.Path, below: str, limit_bytes: int, deadline_s: float | None = None
    ) -> bytes:
        """Return all bytes of a file, named ``below`` in messages; CorruptData over the limit."""
        read = partial(read_at_most, path, limit_bytes + 1)
        data = self.do("read", below, read, deadline_s, again_after_s=_STALLED_S)
        if len(data) > limit_bytes:
            expected = f"at most {limit_bytes} bytes"
            raise CorruptData("read", str(path), "too long", expected=expected)
        return data

    def put(
        self,
        below: str,
        data: bytes,
        deadline_s: float | None = None,
        *,
        temporary_name: str = "",
    ) -> None:
        """Replace a file atomically. Not for a file of a step: no late call is waited for.

        ``temporary_name``: in the place of the file's name in that of the temporary file, for who
        clears the temporary files of writers that were killed.
        """
        path = self.path / below

        def put() -> None:
            if not self.is_object_store:
                with _repeated_after_removal(), _temporary(path, temporary_name) as temporary:
                    temporary.write_bytes(data)
                    temporary.replace(path)
                return
            # An object appears when its upload ends. A rename would copy it.
            try:
                # One request. Opening and closing a file takes two.
                self._client().pipe_file(str(path), data)
            except FileExistsError as error:
                # A precondition that this process did not set, or the answer to a repeated request
                # whose first reply was lost.
                if not _has(path, data):
                    reason = f"refused with a precondition that was not set: {error}"
                    raise ConnectionError(reason) from error

        self.do("write", f"/{below}", put, deadline_s)

    def put_new(self, below: str, data: bytes) -> None:
        """Create a file atomically; FileExistsError when it exists. For use inside ``do``.

        Idempotent: no error when the file already has these bytes.
        """
        path = self.path / below
        try:
            if not self.is_object_store:
                path.parent.mkdir(exist_ok=True)
            self._create(path, data)
        except FileExistsError as error:
            self.forget_listings()
            if not _has(path, data):
                raise FileExistsError("another writer has written it meanwhile") from error

    def put_first(self, below: str, data: bytes, deadline_s: float | None = None) -> bool:
        """Create a file atomically if absent; return True when this call created the file.

        False also when this call created the file and the reply was lost: read the file to know.
        """
        path = self.path / below

        def put() -> bool:
            try:
                with _repeated_after_removal():
                    self._create(path, data)
            except FileExistsError:
                return False
            return True

        return self.do("write", f"/{below}", put, deadline_s)

    def _create(self, path: epath.Path, data: bytes) -> None:
        if self.is_object_store:
            # With the precondition that the object does not exist.
            self._client().pipe_file(str(path), data, mode="create")
        else:
            _link_new(path, data)

    def lexists(self, below: str) -> bool:
        """Return whether a file system has the name ``below``, even as a dangling link."""
        look = partial(is_there, self.path / below, follows=False)
        return self.do("inspect", f"/{below}", look)

    def deadline_s(self, deadline_s: float | None) -> float:
        """Return ``deadline_s``, of ``time.monotonic``, or ``timeout_s`` from now."""
        return time.monotonic() + self.timeout_s if deadline_s is None else deadline_s

    def do(
        self,
        operation: str,
        below: str,
        work: Callable[[], _T],
        deadline_s: float | None = None,
        *,
        progress: WorkProgress | None = None,
        changes: int | None = None,
        again_after_s: float = math.inf,
    ) -> _T:
        """Return the result of ``work``, which is retried on temporary errors.

        ``progress``: for work that is not retried, and has time as long as bytes move.
        ``changes``: the step that ``work`` changes; timed-out calls on that step end first.
        ``again_after_s``: as in ``call``, for work that changes nothing.
        """
        deadline_s = self.deadline_s(deadline_s) if progress is None else progress.deadline_s
        target = f"{self.path}{below}"
        try:
            if self._is_gcs and self._bucket not in _HAS_FOLDERS:
                call_with_retries(target, self._refuse_zonal, deadline_s=deadline_s)
            if changes is not None:
                LATE_CHANGES.wait(str(self.path), changes, deadline_s)
            if progress is not None:
                return call(target, work, progress=progress)
            return call_with_retries(
                target, work, deadline_s=deadline_s, again_after_s=again_after_s
            )
        except (CorruptData, PersistentTierError, InvalidState):
            raise
        except Exception as error:  # Orbax and the clients pass on errors of any type
            if changes is not None and isinstance(error, StorageTimeout):
                LATE_CHANGES.note(str(self.path), changes, error.thread)
            raise self.error(operation, below, error) from error

    def is_changing(self, step: int) -> bool:
        """Return True when a timed-out call may still change ``step``. Does not block."""
        return LATE_CHANGES.under_way(str(self.path), step)

    def error(self, operation: str, below: str, error: Exception) -> CheckpointError:
        """Return the typed error, with a hint: CorruptData for bytes that cannot be decoded."""
        text = text_of(error)
        if is_damage(error):
            return CorruptData(operation, f"{self.path}{below}", text, hint=_DAMAGED_HINT)
        if is_refusal(error):
            right = _RIGHTS.get(operation, "create")
            hint = f"give this job's credentials the right to {right} there, in a bucket"
            hint += f" storage.objects.{right}"
            if right == "delete":
                hint += "; a retention policy or a hold of the bucket refuses that too"
        elif errno_of(error) == errno.EFBIG:
            hint = file_size_hint()
        elif errno_of(error) in (errno.ENOSPC, errno.EDQUOT):
            hint = "make room there; keep_last_n limits the number of steps that are kept"
        elif "bucket" in text and isinstance(error, FileNotFoundError):
            hint = "create the bucket, or correct dir"
        else:
            hint = "check that the directory is reachable and writable"
        problem = text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
        failure = PersistentTierError(operation, f"{self.path}{below}", problem, hint=hint)
        failure.retryable = is_passing(error)
        failure.unreachable = is_unreachable(error)
        return failure


_RIGHTS = {
    "list": "list",
    "read": "get",
    "inspect": "get",
    "describe": "get",
    "remove": "delete",
    "hide": "delete",
}


def text_of(error: Exception) -> str:
    """Return ``error`` in one line, without the settings that TensorStore appends."""
    return str(error).split("\n", maxsplit=1)[0].partition(" [tensorstore_spec=")[0][:500]


def _client_of(scheme: str) -> Any:
    # With epath's options this is epath's client: fsspec keeps one client per set of options.
    options = {"finalize_on_close": True} if scheme in ("gs", "gcs") else {}
    return fsspec.filesystem(scheme, **options)


def read_at_most(path: epath.Path, limit_bytes: int) -> bytes:
    """Return at most ``limit_bytes`` of a file. For use inside ``StorageDirectory.do``."""
    scheme = str(path).partition("://")[0]
    if scheme != "gs":
        with path.open("rb") as file:
            return file.read(limit_bytes)
    try:
        # One request. Opening the object takes two more, for its size and whether it is a folder.
        return _client_of(scheme).cat_file(str(path), start=0, end=limit_bytes)
    except Exception as error:
        if getattr(error, "code", None) != _UNSATISFIABLE:
            raise
        return b""  # the object is empty, since it has no range at all


def is_there(path: epath.Path, *, follows: bool = True) -> bool:
    """Return whether a file exists; ``follows``: a link's target. For use inside ``do``.

    ``path.exists()`` takes every error of a file system for absence: a refusal, or a server that
    does not answer for a moment.
    """
    try:
        if "://" in str(path):
            read_at_most(path, 1)  # one request; a folder of that name is not asked for
        else:
            os.stat(path, follow_symlinks=follows)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _has(path: epath.Path, data: bytes) -> bool:
    """Return whether a file that storage has reported has these bytes.

    ConnectionError without a file: the file was removed meanwhile, or storage has contradicted
    itself, and the write may succeed later.
    """
    try:
        return read_at_most(path, len(data) + 1) == data
    except FileNotFoundError as error:
        raise ConnectionError(f"{path} is said to exist, and does not") from error


_NO_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


_TEMPORARY = re.compile(r"[0-9a-f]{16}\.(.+)\.tmp", re.ASCII)


def written_for(name: str) -> str:
    """Return the name of the file that a temporary file was to become; empty for other files."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else ""


@contextlib.contextmanager
def _temporary(path: epath.Path, name: str = "") -> Generator[epath.Path]:
    """Give a name beside ``path`` for one writer alone: another would write into its file.

    No file of this name is left at the end, also not a part of one, as on a full disk. A writer
    that is killed leaves the file, which ``written_for`` recognises. ``name`` takes the place of
    the name of ``path`` in the temporary name.
    """
    temporary = path.with_name(f"{secrets.token_hex(8)}.{name or path.name}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _repeated_after_removal() -> Generator[None]:
    """Raise a passing error inside ``do`` when another process removed the temporary file.

    That process took the writer for dead, which has only stalled for long.
    """
    try:
        yield
    except FileNotFoundError as error:
        if error.filename2 is None:
            raise  # the folder is missing, since the temporary file could not be made
        raise ConnectionError("the temporary file was removed meanwhile") from error


def _link_new(path: epath.Path, data: bytes) -> None:
    """Create a file atomically at ``path``; FileExistsError when it exists.

    The file survives a loss of power from then on, if the file system can sync a folder. On a file
    system without hard links the file is empty for a moment.
    """
    with _temporary(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            open(path, "xb").close()
            temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: epath.Path) -> None:
    """Let the names in a folder of a file system survive a loss of power.

    Some file systems refuse this. The names are there, and others may have read them already.
    """
    with contextlib.suppress(OSError), closing(os.open(path, os.O_RDONLY)) as fd:
        os.fsync(fd)


_NAME = re.compile(r"probe-([0-9]{12})-[0-9a-f]{16}")


def probe_storage(
    storage: StorageDirectory, incarnation: str, deadline_s: float, *, conditions: bool = False
) -> None:
    """Raise PersistentTierError when saves cannot use the directory. Blocks until the deadline.

    The file is created only if absent, like TensorStore's files in a bucket, at a place that
    neither Orbax nor a listing of steps reads. Files of crashed starts are removed.

    Args:
      incarnation: of this life; part of the file's name, so that no other start uses it.
      deadline_s: of ``time.monotonic``.
      conditions: also check that the file is not created a second time.
    """
    storage.create(deadline_s)
    name = f"probe-{incarnation}"
    # First, so that a start leaves no further file where deletions are refused.
    for other in storage.names_in(HOST_STATE, deadline_s):
        if is_left_over(other, name):
            _remove(storage, other, deadline_s)
    try:
        _write_and_read(storage, f"{HOST_STATE}/{name}", incarnation.encode(), deadline_s)
        if conditions:
            _check_conditions(storage, f"{HOST_STATE}/{name}", deadline_s)
    except PersistentTierError as error:
        try:
            _remove(storage, name, deadline_s)
        except PersistentTierError as second:
            error.add_note(f"The file may still be there: {second}")
        raise
    _remove(storage, name, deadline_s)


def storage_time_s(storage: StorageDirectory) -> float | None:
    """Return the Unix time by the clock of storage: that of a small file, which is removed.

    None where a start removes the file at this moment, for one of a start that was killed.
    """
    name = f"probe-{0:012d}-{secrets.token_hex(8)}"
    below, deadline_s = f"{HOST_STATE}/{name}", storage.deadline_s(None)
    try:
        storage.do("write", f"/{below}", lambda: storage.put_new(below, name.encode()), deadline_s)
        return storage.changed_s(below, deadline_s)
    finally:
        _remove(storage, name, deadline_s)


def is_left_over(name: str, own: str) -> bool:
    """Return True when ``name`` is a file of an earlier start, by the numbers in both names.

    A start that was killed also leaves the temporary file of its file.
    """
    other, mine = _NAME.fullmatch(written_for(name) or name), _NAME.fullmatch(own)
    return other is not None and mine is not None and other[1] < mine[1]


def _write_and_read(storage: StorageDirectory, below: str, data: bytes, deadline_s: float) -> None:
    storage.do("write", f"/{below}", lambda: storage.put_new(below, data), deadline_s)
    read_back = storage.bytes_of(below, deadline_s)
    if read_back != data:
        target, problem = f"{storage.path}/{below}", "the bytes differ from those just written"
        actual = read_back and read_back[: 2 * len(data)]
        raise PersistentTierError("read", target, problem, expected=data, actual=actual)


def _check_conditions(storage: StorageDirectory, below: str, deadline_s: float) -> None:
    if storage.put_first(below, b"another writer", deadline_s):
        problem = "it was created although it existed: two runs could not be kept apart"
        hint = "use storage that honours preconditions, or a file system with hard links"
        raise PersistentTierError("write", f"{storage.path}/{below}", problem, hint=hint)


def _remove(storage: StorageDirectory, name: str, deadline_s: float) -> None:
    below = f"{HOST_STATE}/{name}"
    path = storage.path / below
    storage.do("remove", f"/{below}", lambda: path.unlink(missing_ok=True), deadline_s)
