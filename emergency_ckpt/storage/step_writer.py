"""The write of a step by some processes of the job, as the files that Orbax would write.

1. The first writer creates ``_CHECKPOINT_METADATA``, and so claims the step's place.
2. Each writer writes its arrays of each item into a database, and the documents beside that.
3. The first writer merges the databases of the others into that of the item.
4. It creates the items' manifests. Then, if ``_CHECKPOINT_METADATA`` is still the file of 1, it
   replaces that file by one with the time of the commit.
5. It creates ``commit_success.txt`` of each item, then that of the step. If the place was cleared
   between 4 and 5, it removes these files.

Each file is created only if absent, on a file system too: no file of another writer is replaced. A
file system and a bucket differ in two points:

- In a bucket a step counts with the last file of 5. In a file system all is written in a temporary
  folder, named as Orbax does and after this attempt, which gets the step's name after 5.
- In a bucket the database of the first writer is that of the item, which saves requests, and there
  is no manifest before 4. In a file system each writer's database is in a folder of its own, named
  after the attempt, because the kernel may delay TensorStore's last write of an attempt that was
  given up.

Orbax's own checkpointer makes some fifty requests in a bucket, one after the other. The barriers of
that checkpointer have fixed timeouts of minutes, and a blocked thread aborts the process at exit.

Guaranteed: a step whose place was cleared or claimed by another writer is not committed, and this
writer fails. The exception: the place in a bucket is cleared while ``commit_success.txt`` is
written, and this process ends before it has noticed that and removed the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from emergency_ckpt.core.step_names import (
    MANIFEST,
    METRICS,
    OWN_TEMPORARY,
    STEP_METADATA,
    TREE,
    commits_of,
)
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.storage.array_writes import (
    ArrayWrites,
    UnpublishedDatabase,
    new_context,
    published_database_spec,
)
from emergency_ckpt.storage.calls import result_of, wait_for
from emergency_ckpt.storage.directory import sync_folder
from emergency_ckpt.storage.item import SHARDINGS, ItemTree, array_metadata, shardings
from emergency_ckpt.storage.marker import OURS
from emergency_ckpt.storage.meetings import BEGUN, WRITTEN, Meet
from emergency_ckpt.storage.orbax_reader import kvstore_of
from emergency_ckpt.types import OrbaxStep, SaveId


class StepWriter:
    """One process's part of one step. ``write`` is called once.

    Args:
      folder: of the step.
      states: by name, the state of each item with arrays, as ``item_state`` returns the state.
      writers: the processes that write, the first of which commits.
    """

    def __init__(
        self,
        folder: epath.Path,
        save: SaveId,
        states: Mapping[str, Any],
        writers: Sequence[int],
        writes: ArrayWrites,
        *,
        orbax: OrbaxStep,
        meet: Meet,
    ) -> None:
        self._final = folder
        self._in_bucket = "://" in str(folder)
        suffix = "" if self._in_bucket else f"{OWN_TEMPORARY}{writes.attempt}"
        self._folder = folder.parent / f"{folder.name}{suffix}"
        self._save = save
        self._items = {name: ItemTree(state) for name, state in states.items()}
        self._orbax = orbax
        self._first, self._others = writers[0], tuple(writers[1:])
        self._writes = writes
        self._meet = meet
        self._objects = StepObjects(str(self._folder))
        self._begun_ns = time.time_ns()
        described = {n: array_metadata(item.arrays) for n, item in self._items.items()}
        self._arrays_documents = {n: text for n, text in described.items() if text is not None}

    def write(self) -> None:
        """Write this process's part; the first writer returns when Orbax counts the step. Blocks.

        PersistentTierError, also after the save was cancelled; CorruptData; FileExistsError when
        the step exists already; errors of TensorStore pass through.
        """
        process = jax.process_index()
        if process != self._first:
            self._meet(BEGUN)
            self._write_own(process)
            self._meet(WRITTEN)
            return
        claim = self._claim()
        self._meet(BEGUN)
        merged = {n: UnpublishedDatabase(f"{self._folder}/{n}", self._writes) for n in self._items}
        apart = self._others
        if self._in_bucket:
            self._write_into({name: database.store for name, database in merged.items()})
        else:
            self._write_own(process)
            apart = (process, *apart)
        self._meet(WRITTEN)
        self._writes.check()
        self._check_others()
        manifests: dict[str, bytes] = {}
        for name, database in merged.items():
            database.merge([f"{self._folder}/{self._database_of(name, other)}" for other in apart])
            manifests |= _manifest(database, name)
        self._commit(claim, manifests)

    def _write_own(self, process: int) -> None:
        """Write the part of this process into databases of its own."""
        folders = {name: self._database_of(name, process) for name in self._items}
        if not self._in_bucket:
            opened = {
                name: self._writes.open(
                    published_database_spec(f"{self._folder}/{folder}"), new_context()
                )
                for name, folder in folders.items()
            }
            self._write_into(opened)
            return
        own = {
            name: UnpublishedDatabase(f"{self._folder}/{folder}", self._writes)
            for name, folder in folders.items()
        }
        self._write_into({name: database.store for name, database in own.items()})
        self._writes.check()
        for name, database in own.items():
            self._objects.write(_manifest(database, folders[name]))

    def _write_into(self, databases: Mapping[str, tensorstore.KvStore]) -> None:
        """Write this process's arrays into each item's database, and the documents meanwhile."""
        documents = self._objects.begin(dict(self._documents()))
        try:
            for name, database in databases.items():
                self._writes.write_into(database, self._items[name].arrays)
        except BaseException:
            self._objects.settle(documents)
            raise
        self._objects.generations(documents)

    def _claim(self) -> bytes:
        """Claim the step's place; return the generation of the file that shows the claim."""
        if not self._in_bucket:
            if self._final.exists():
                raise FileExistsError(f"{self._final} exists already")
            self._folder.mkdir()
        return self._objects.write({STEP_METADATA: self._metadata(None)})[STEP_METADATA]

    def _commit(self, claim: bytes, manifest: Mapping[str, bytes]) -> None:
        self._writes.check()
        self._objects.write(manifest)
        # Written alone, after all other files: it shows that no writer has cleared the place.
        metadata = self._metadata(time.time_ns())
        self._objects.write({STEP_METADATA: metadata}, over={STEP_METADATA: claim})
        names = commits_of(self._handlers())
        self._objects.commit(names, self._save.incarnation, metadata, self._writes.check)
        if not self._in_bucket:
            self._writes.check()
            self._folder.rename(self._final)
            sync_folder(self._final.parent)

    def _database_of(self, item: str, process: int) -> str:
        return f"{item}/{self._writes.database_of(process)}"

    def _documents(self) -> Iterator[tuple[str, bytes]]:
        process = jax.process_index()
        for item, text in self._arrays_documents.items():
            yield _arrays_name(item, process), text.encode()
        if process != self._first:
            return
        for item, tree in self._items.items():
            yield f"{item}/{TREE}", tree.document().encode()
            text = shardings(tree.arrays)
            if text is not None:
                yield f"{item}/{SHARDINGS}", text.encode()
        if self._orbax.metrics is not None:
            yield f"{METRICS}/{METRICS}", json.dumps(self._orbax.metrics).encode()

    def _check_others(self) -> None:
        """Raise CorruptData when another writer divided the arrays in another way."""
        for item, own in self._arrays_documents.items():
            names = {writer: _arrays_name(item, writer) for writer in self._others}
            documents = self._objects.read(names.values())
            for writer, name in names.items():
                if documents.get(name) != own.encode():
                    problem = f"process {writer} stored other arrays than this process"
                    raise CorruptData("save", f"{self._folder}/{name}", problem)

    def _handlers(self) -> dict[str, str]:
        """Return the name of Orbax's handler of each item."""
        handlers = dict.fromkeys(self._items, ocp.PyTreeCheckpointHandler.typestr())
        if self._orbax.metrics is not None:
            handlers[METRICS] = ocp.JsonCheckpointHandler.typestr()
        return handlers

    def _metadata(self, committed_ns: int | None) -> bytes:
        """Return the document of the step, as Orbax's manager writes it."""
        ours = {"run_id": self._save.run_id, "incarnation": self._save.incarnation}
        return json.dumps(
            {
                "item_handlers": self._handlers(),
                "metrics": self._orbax.metrics or {},
                "performance_metrics": {},
                "init_timestamp_nsecs": self._begun_ns,
                "commit_timestamp_nsecs": committed_ns,
                "custom_metadata": {**self._orbax.custom_metadata, OURS: ours},
            }
        ).encode()


def _arrays_name(item: str, process: int) -> str:
    """Return the name of the document of the arrays that ``process`` wrote."""
    return f"{item}/array_metadatas/process_{process}"


def _manifest(database: UnpublishedDatabase, folder: str) -> dict[str, bytes]:
    manifest = database.manifest()
    return {} if manifest is None else {f"{folder}/{MANIFEST}": manifest}


class _Write(NamedTuple):
    data: bytes
    future: Any


Writes = dict[str, _Write]
"""Writes under way, by the names of the objects. ``settle`` or ``generations`` must be called."""


class StepObjects:
    """The files below one folder. All methods block until storage has answered, however late.

    Otherwise a write might take effect after the step was cleared, and show in a later save of the
    step. TensorStore retries after temporary errors; other errors of TensorStore, ValueError, pass
    through. A reply may be lost, and the precondition then refuses the repeated write: the bytes in
    storage show whose write they are.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")
        self._store = result_of(tensorstore.KvStore.open(kvstore_of(self._folder)))
        self._absent = _generation_of_nothing()

    def begin(
        self, objects: Mapping[str, bytes], over: Mapping[str, bytes] | None = None
    ) -> Writes:
        """Begin to write ``objects``, given by name, all at once. Does not block.

        ``over``: the generations of existing objects to replace; the other objects must not exist.
        """
        over = over or {}
        writes: Writes = {}
        for name, data in objects.items():
            future = self._store.write(name, data, if_equal=over.get(name, self._absent))
            writes[name] = _Write(data, future)
        return writes

    def settle(self, writes: Writes) -> None:
        """Wait until storage has answered, whatever the answer: the save has failed already."""
        for write in writes.values():
            wait_for(write.future)

    def generations(self, writes: Writes) -> dict[str, bytes]:
        """Return the generation of each object by its name; PersistentTierError after a failure."""
        self.settle(writes)
        return {name: self._generation_of(name, write) for name, write in writes.items()}

    def _generation_of(self, name: str, write: _Write) -> bytes:
        generation = result_of(write.future).generation
        if generation:
            return generation
        result = result_of(self._store.read(name))
        if result.state == "value" and result.value == write.data:
            return result.stamp.generation
        raise self._lost(name)

    def write(
        self, objects: Mapping[str, bytes], over: Mapping[str, bytes] | None = None
    ) -> dict[str, bytes]:
        """Write ``objects`` as ``begin`` does; return the generation of each.

        PersistentTierError when another process has written or removed one of the objects.
        """
        return self.generations(self.begin(objects, over))

    def commit(
        self,
        names: Iterable[str],
        incarnation: str,
        metadata: bytes,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the files by which Orbax counts the step; ``check`` is called before each write.

        The files are removed again if Orbax's metadata are not ``metadata``, as when a newer life
        has the place: PersistentTierError.
        """
        text = f"Checkpoint commit was successful by incarnation {incarnation}".encode()
        written: dict[str, bytes] = {}
        for name in names:
            check()
            written |= self.write({name: text})
        if self.read([STEP_METADATA]).get(STEP_METADATA) != metadata:
            self.remove(dict(reversed(written.items())))
            raise self._lost(STEP_METADATA)

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of the objects that exist."""
        reads = {name: self._store.read(name) for name in names}
        results = {name: result_of(future) for name, future in reads.items()}
        return {name: result.value for name, result in results.items() if result.state == "value"}

    def remove(self, generations: Mapping[str, bytes]) -> None:
        """Remove objects that still have these generations, in this order."""
        for name, generation in generations.items():
            result_of(self._store.write(name, None, if_equal=generation))

    def _lost(self, name: str) -> PersistentTierError:
        problem = "it was written or removed by another process meanwhile"
        hint = "only one job may save in a directory; the next save tries again"
        return PersistentTierError("save", f"{self._folder}/{name}", problem, hint=hint)


def _generation_of_nothing() -> bytes:
    """Return TensorStore's generation of a key without a value."""
    memory = result_of(tensorstore.KvStore.open("memory://"))
    return result_of(memory.read("")).stamp.generation
