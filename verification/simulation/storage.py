"""The persistent tier's storage: calls take time, fail, and end half done.

Here is how storage behaves, and a directory of a file system; ``bucket`` is an object store, and
``arrays`` what TensorStore does in both.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sim
from etils.epath import backend
from orbax.checkpoint import utils as ocp_utils

METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
ITEM = "state"

_NUMBERED = re.compile(r"/host_state/(run|log)/\d{12}\.json$")
_READS = ("exists", "isdir", "listdir", "glob", "stat")
_CHANGES = ("makedirs", "mkdir", "remove", "rename", "replace")


class Behaviour:
    """How long a call takes, and whether it fails; set by the history for each life.

    ``fault`` returns "", "lost" (no effect), "unheard" (an effect, then an error) or "full".
    ``create_fault`` too, for creates that need the name to be free. ``before``: called before each
    call, with "call" or "create". ``created``: the first bytes of each numbered file, which must
    not change, by path. ``again``: those that a late writer has made again after their removal.
    """

    def __init__(self) -> None:
        self.delay: Callable[[], float] = lambda: 0.0
        self.fault: Callable[[], str] = lambda: ""
        self.create_fault: Callable[[], str] = lambda: ""
        self.before: Callable[[str], None] = lambda what: None
        self.created: dict[str, bytes] = {}
        self.again: set[str] = set()
        self.listing_late_s = 0.0
        self._listings: dict[tuple[str, str], tuple[float, set[str]]] = {}

    def listed(self, folder: str, names: set[str]) -> set[str]:
        """Return what a host sees of a folder that has ``names``: as a file server's client."""
        key, now_s = (sim.scheduler.here().process.host.name, folder), sim.scheduler.now_s
        at_s, seen = self._listings.get(key, (-1e9, names))
        if now_s - at_s >= self.listing_late_s:
            at_s, seen = self._listings[key] = (now_s, names)
        return set(seen)

    def note_created(self, path: Any, data: bytes) -> None:
        """Note the first bytes of a numbered file."""
        if _NUMBERED.search(str(path)):
            self.created.setdefault(str(path), data)

    def note_again(self, path: Any) -> None:
        """Note that a file is about to be made, where it was made before and removed."""
        if str(path) in self.created and not os.path.exists(path):
            self.again.add(str(path))

    def changed(self, path: Any, host: Any = None) -> None:
        """Note that a host, else the running task's, has changed a folder: it sees it as it is."""
        host = host or sim.scheduler.here().process.host
        self._listings.pop((host.name, os.path.dirname(str(path))), None)


behaviour = Behaviour()


def begin() -> None:
    """Forget the storage of the history before."""
    behaviour.__init__()


def arrive(path: Any) -> str:
    """Take the time of a call; return what its fault is, or ""."""
    scheduler = sim.scheduler
    if scheduler.current is None or "eckpt-simulation" not in str(path):
        return ""
    behaviour.before("call")
    scheduler.call(behaviour.delay())
    return behaviour.fault()


def fail(kind: str, path: Any) -> None:
    """Raise the error of a fault."""
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    raise OSError(errno.EIO, "Input/output error", str(path))


def _wrapped(real: Callable[..., Any], changes: bool) -> Callable[..., Any]:
    def call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        kind = arrive(path)
        if kind == "lost" or (kind == "full" and changes):
            fail(kind, path)
        result = real(self, path, *args, **kwargs)
        if changes and sim.scheduler.current is not None:
            for each in (path, *args[:1]):
                behaviour.changed(each)
        if kind == "unheard":
            fail(kind, path)
        return result

    return call


class _Upload(io.BytesIO):
    """A file being written: empty at first, whole when it is closed."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._path = path
        with open(path, "wb"):
            pass

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            _write(self._path, data)


def _write(path: Any, data: bytes) -> None:
    kind = arrive(path)
    if kind in ("lost", "full"):
        fail(kind, path)
    with open(path, "wb") as file:
        file.write(data)
    if sim.scheduler.current is not None:
        behaviour.changed(path)
        behaviour.note_created(path, data)
    if kind == "unheard":
        fail(kind, path)


def _open(self: Any, path: Any, mode: str) -> Any:
    del self
    kind = arrive(path)
    if kind in ("lost", "unheard"):
        fail(kind, path)
    if sim.scheduler.current is not None and mode == "wb":
        return _Upload(path)
    return open(path, mode, encoding=None if "b" in mode else "utf-8")


def _remove_tree(self: Any, path: Any) -> None:
    """Remove a folder file by file, so that a crash leaves some of it."""
    if not os.path.isdir(path):
        self.remove(path)
        return
    for name in sim.scheduler.random.sample(sorted(os.listdir(path)), len(os.listdir(path))):
        _remove_tree(self, os.path.join(path, name))
    if arrive(path):
        fail("lost", path)
    os.rmdir(path)


def _create(real: Callable[..., None]) -> Callable[..., None]:
    """Return a create that needs the name to be free, whose answer may be lost."""

    def create(path: Any, data: bytes, **options: Any) -> None:
        behaviour.before("create")
        kind = arrive(path) or behaviour.create_fault()
        if kind in ("lost", "full"):
            fail(kind, path)
        behaviour.note_again(path)
        try:
            real(path, data, **options)
        finally:  # also of a writer that is killed right after
            if os.path.exists(path) and Path(path).read_bytes() == data:
                behaviour.note_created(path, data)
        behaviour.changed(path)
        if kind == "unheard":
            fail(kind, path)

    return create


def _is_finalized(path: Any) -> bool:
    """Return what Orbax's function does, without threads of its own."""
    if not path.exists() or not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if "://" in str(path):
        return (path / COMMITTED).exists()
    return ".orbax-checkpoint-tmp" not in path.name


def _names_in(real: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def names_in(self: Any, below: str = "", deadline_s: float | None = None) -> set[str]:
        found = real(self, below, deadline_s)
        return found if self.is_object_store else behaviour.listed(str(self.path / below), found)

    return names_in


def install() -> None:
    """Put the simulated storage in the place of the file system and of Orbax. Once."""
    kind: Any = type(backend.os_backend)
    for name in _READS + _CHANGES:
        setattr(kind, name, _wrapped(getattr(kind, name), name in _CHANGES))
    kind.open = _open
    kind.rmtree = _remove_tree
    replace(ocp_utils, "is_checkpoint_finalized", _is_finalized)
    directory = _module("storage.directory")
    replace(directory, "_link_new", _create(directory._link_new))
    names_in = directory.StorageDirectory.names_in
    replace(directory.StorageDirectory, "names_in", _names_in(names_in))


def replace(module: Any, name: str, value: Any) -> None:
    """Replace a function or class of the product."""
    assert hasattr(module, name), f"{module.__name__} has no {name} any more"
    setattr(module, name, value)


def _module(name: str) -> Any:
    return sys.modules[f"emergency_ckpt.{name}"]
