"""An object store: whole objects with generations and conditions, and no folders.

Its objects are files below a root, so the oracle reads them as those of a directory. A change may
be done after the process that asked for it was killed: the request was on its way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sim
import storage
from etils.epath import backend
from scheduler import Process

URL = "gs://simulated"
_TRAVELS = 0.3
"""The part of the changes whose requests outlive the process that sends them."""
_LATE_S = (0.0, 0.3, 3.0, 30.0)
"""How much later such a request of a process that was killed may come."""


class Objects:
    """The objects, by the paths of their files. Nothing takes time here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server = Process("bucket", 97, None)
        self._generations: dict[Path, int] = {}
        self._last = 0

    def path_of(self, name: object) -> Path:
        """Return the file of an object, or the folder of those below a name."""
        text = str(name)
        text = text.removeprefix(URL).removeprefix(URL.partition("://")[2])
        return self.root / text.strip("/")

    def generation_of(self, path: Path) -> int:
        """Return the generation of an object; 0 when there is none."""
        if not path.is_file():
            return 0
        if path not in self._generations:
            self._generations[path] = self._next()
        return self._generations[path]

    def write(self, path: Path, data: bytes, generation: int | None = None) -> int:
        """Write an object; return its generation, or 0 where it has not ``generation``."""
        if generation is not None and self.generation_of(path) != generation:
            return 0
        storage.behaviour.note_again(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if generation == 0:
            storage.behaviour.note_created(path, data)
        self._generations[path] = self._next()
        return self._generations[path]

    def delete(self, path: Path, generation: int) -> bool:
        """Delete an object that has ``generation``; return whether it had."""
        if not generation or self.generation_of(path) != generation:
            return False
        path.unlink()
        for folder in path.parents:  # there are none, as soon as nothing is in them
            if folder == self.root or any(folder.iterdir()):
                break
            folder.rmdir()
        return True

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, in their order."""
        folder = self.root / prefix.rpartition("/")[0]
        before = len(f"{self.root}/")
        return sorted(
            name
            for place, _, files in os.walk(folder)
            for file in files
            if (name := f"{place}/{file}"[before:]).startswith(prefix)
        )

    def _next(self) -> int:
        self._last += 1
        return self._last


objects = Objects(Path())


def begin(root: Path) -> None:
    """Empty the object store, which keeps its objects below ``root``."""
    objects.__init__(root)


def travel(sender: Process, delay_s: float) -> None:
    """Take the time of a request's way, in a task of its own; it is longer once nobody waits."""
    sim.scheduler.sleep(delay_s)
    if not sender.alive:
        sim.scheduler.sleep(sim.scheduler.random.choice(_LATE_S))


def _look(path: Path, act: Callable[[], Any]) -> Any:
    """Return the answer to a request that changes nothing."""
    kind = storage.arrive(path)
    if kind:
        storage.fail("lost", path)
    return act()


def _change(path: Path, act: Callable[[], Any], what: str = "call") -> Any:
    """Return the answer to a request that changes something; ``what``: as ``Life.stalls``."""
    behaviour, scheduler = storage.behaviour, sim.scheduler
    task = scheduler.here()
    behaviour.before(what)
    scheduler.call()
    delay_s = behaviour.delay()
    kind = behaviour.fault() or (behaviour.create_fault() if what == "create" else "")
    if kind in ("lost", "full"):
        scheduler.sleep(delay_s)
        storage.fail("lost", path)
    answers: list[tuple[Any, OSError | None]] = []

    def serve() -> None:
        travel(task.process, delay_s)
        try:
            answers.append((act(), None))
        except OSError as error:
            answers.append((None, error))
        scheduler.wake(task)

    if scheduler.random.random() < _TRAVELS:
        scheduler.spawn(objects.server, "request", serve)
        while not answers:
            scheduler.block(None)
    else:
        serve()
    if kind == "unheard":
        storage.fail("unheard", path)
    value, error = answers[0]
    if error is not None:
        raise error
    return value


class Client:
    """The client that the product and Orbax's paths have: what they ask of gcsfs."""

    def invalidate_cache(self) -> None:
        """Do nothing: it keeps none."""

    def exists(self, name: Any) -> bool:
        path = objects.path_of(name)
        return _look(path, path.exists)

    def isdir(self, name: Any) -> bool:
        path = objects.path_of(name)
        return _look(path, path.is_dir)

    def cat_file(self, name: str, *, start: int, end: int) -> bytes:
        path = objects.path_of(name)

        def read() -> bytes:
            if not path.is_file():
                raise FileNotFoundError(name)
            return path.read_bytes()[start:end]

        return _look(path, read)

    def pipe_file(self, name: str, data: bytes, mode: str = "overwrite") -> None:
        path, creates = objects.path_of(name), mode == "create"

        def write() -> None:
            if not objects.write(path, data, 0 if creates else None):
                raise FileExistsError(name)

        _change(path, write, "create" if creates else "call")

    def rm(self, name: Any, *, recursive: bool) -> None:
        assert not recursive, "the product deletes objects by their generations"
        path = objects.path_of(name)

        def remove() -> None:
            if not objects.delete(path, objects.generation_of(path)):
                raise FileNotFoundError(str(name))

        _change(path, remove)

    def makedirs(self, name: Any, *, exist_ok: bool) -> None:
        """Do nothing: there are no folders."""
        del name, exist_ok

    def call(
        self, method: str, form: str, *names: str, json_out: bool = False, **query: str
    ) -> Any:
        """Delete an object, list some, or tell how the bucket stores."""
        del json_out
        if method == "GET" and form == "b/{}/o":
            return self._list(**query)
        if method == "GET":
            assert form == "b/{}/storageLayout", form
            return {"locationType": "region"}
        assert (method, form) == ("DELETE", "b/{}/o/{}"), (method, form)
        return self._delete(names[-1], **query)

    def _list(self, *, prefix: str, delimiter: str = "", maxResults: str) -> Any:
        """Return all in one page."""
        del maxResults

        def listed() -> dict[str, Any]:
            items: list[dict[str, str]] = []
            prefixes: set[str] = set()
            for name in objects.names(prefix):
                first, is_folder, _ = name.removeprefix(prefix).partition(delimiter or "\n")
                if is_folder:
                    prefixes.add(f"{prefix}{first}{delimiter}")
                else:
                    generation = objects.generation_of(objects.root / name)
                    items.append({"name": name, "generation": str(generation)})
            return {"items": items, "prefixes": sorted(prefixes)}

        return _look(objects.path_of(prefix), listed)

    def _delete(self, name: str, *, ifGenerationMatch: str = "") -> Any:
        path = objects.path_of(name)

        def delete() -> None:
            if not path.is_file():
                raise FileNotFoundError(name)
            there = objects.generation_of(path)
            if not objects.delete(path, int(ifGenerationMatch or there)):
                raise FileExistsError(name)

        return _change(path, delete, "delete")


def install() -> None:
    """Give the product and Orbax's paths this client. Once."""
    client = Client()
    kind: Any = type(backend.fsspec_backend)
    kind.fs = lambda self, path: client
    directory = sys.modules["emergency_ckpt.storage.directory"]
    storage.replace(directory, "_client_of", lambda scheme: client)
