"""The write of a step by some processes of the job, as the files that Orbax would write.

1. The first writer creates ``_CHECKPOINT_METADATA``: it has claimed the step's place.
2. Each writer writes its arrays into a database, and beside it the documents.
3. The first writer merges the databases of the others into that of the item.
4. It creates the item's manifest, then replaces ``_CHECKPOINT_METADATA``, if it is still that of 1,
   by one with the time of the commit.
5. It creates ``commit_success.txt`` of the item, then that of the step. If the place was cleared
   between 4 and 5, it removes both.

Each file is created only if it is absent, on a file system too: no file of another writer is
replaced. A file system and a bucket differ in three points:

- A bucket counts a step with the last file of 5. In a file system all is written in a temporary
  folder of Orbax's name, which gets the step's name after 5.
- In a bucket the database of the first writer is that of the item, which saves requests, and no
  manifest is there before 4. In a file system each writer's is in a folder of its own, because the
  kernel may hold TensorStore's last write of an attempt that was given up, and a folder is named
  after the attempt.
- A folder must be made, and what an attempt has left there removed first.

Orbax's own checkpointer looks for folders in a bucket, lists, and reads what it has just written:
some fifty requests, one after the other. Its barriers have fixed timeouts of minutes, and a thread
blocked in one aborts the process at exit.

Guaranteed: a step whose place was cleared or claimed by another is not committed, and this writer
fails. Not guaranteed: that, when the place in a bucket is cleared while ``commit_success.txt`` is
written, and this process ends before it has looked again and removed it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from emergency_ckpt.storage.item import documents
from emergency_ckpt.storage.item.array_writes import (
    ArrayWrites,
    UnpublishedDatabase,
    new_context,
    published_database_spec,
)
from emergency_ckpt.storage.item.documents import ItemTree
from emergency_ckpt.storage.item.objects import StepObjects
from emergency_ckpt.storage.marker import ITEM, OURS
from emergency_ckpt.storage.meetings import BEGUN, WRITTEN, Meet
from emergency_ckpt.storage.orbax_names import (
    COMMITTED,
    MANIFEST,
    STEP_METADATA,
    TEMPORARY_SUFFIX,
    TREE,
)
from emergency_ckpt.types import SaveId


class StepWriter:
    """One process's part of one step. ``write`` is called once.

    Args:
      directory: of the tier.
      state: as ``item_state`` returns it.
      writers: the processes that write, the first of which commits.
      meet: meets the other writers.
    """

    def __init__(
        self,
        directory: epath.Path,
        save: SaveId,
        state: Any,
        writers: Sequence[int],
        writes: ArrayWrites,
        *,
        meet: Meet,
    ) -> None:
        self._final = directory / str(save.step)
        self._in_bucket = "://" in str(directory)
        suffix = "" if self._in_bucket else TEMPORARY_SUFFIX
        self._folder = directory / f"{save.step}{suffix}"
        self._save = save
        self._tree = ItemTree(state)
        self._first, self._others = writers[0], tuple(writers[1:])
        self._writes = writes
        self._meet = meet
        self._objects = StepObjects(str(self._folder))
        self._begun_ns = time.time_ns()
        self._arrays_document = documents.array_metadata(self._tree.arrays)

    def write(self) -> None:
        """Write this process's part; the first writer returns when Orbax counts the step.

        Blocks. PersistentTierError, also once the save is cancelled; CorruptData; FileExistsError
        when the step is there; errors of TensorStore pass through.
        """
        process = jax.process_index()
        if process != self._first:
            self._meet(BEGUN)
            self._write_own(process)
            self._meet(WRITTEN)
            return
        claim = self._claim()
        self._meet(BEGUN)
        item, apart = UnpublishedDatabase(f"{self._folder}/{ITEM}", self._writes), self._others
        if self._in_bucket:
            self._write_into(item.store)
        else:
            self._write_own(process)
            apart = (process, *apart)
        self._meet(WRITTEN)
        self._writes.check()
        self._check_others()
        item.merge([f"{self._folder}/{self._database_of(each)}" for each in apart])
        self._commit(claim, _manifest(item, ITEM))

    def _write_own(self, process: int) -> None:
        """Write the part of this process into a database of its own."""
        folder = self._database_of(process)
        if not self._in_bucket:
            spec = published_database_spec(f"{self._folder}/{folder}")
            self._write_into(self._writes.open(spec, new_context()))
            return
        database = UnpublishedDatabase(f"{self._folder}/{folder}", self._writes)
        self._write_into(database.store)
        self._writes.check()
        self._objects.write(_manifest(database, folder))

    def _write_into(self, database: tensorstore.KvStore) -> None:
        """Write the arrays of this process into ``database``, and the documents meanwhile."""
        documents_written = self._objects.begin(self._documents())
        try:
            self._writes.write_into(database, self._tree.arrays)
        except BaseException:
            documents_written.settle()
            raise
        documents_written.generations()

    def _claim(self) -> bytes:
        """Take the step's place; return the generation of the file that shows it."""
        if not self._in_bucket:
            if self._final.exists():
                raise FileExistsError(f"{self._final} exists already")
            if self._folder.exists():
                self._folder.rmtree()
            self._folder.mkdir(parents=True)
        return self._objects.write({STEP_METADATA: self._metadata(None)})[STEP_METADATA]

    def _commit(self, claim: bytes, manifest: Mapping[str, bytes]) -> None:
        self._writes.check()
        self._objects.write(manifest)
        # Alone, after all that the step consists of: it shows that nobody has cleared the place.
        metadata = self._metadata(time.time_ns())
        self._objects.write({STEP_METADATA: metadata}, over={STEP_METADATA: claim})
        commits: dict[str, bytes] = {}
        for name in (f"{ITEM}/{COMMITTED}", COMMITTED):
            self._writes.check()
            text = f"Checkpoint commit was successful by incarnation {self._save.incarnation}"
            commits |= self._objects.write({name: text.encode()})
        if self._objects.read([STEP_METADATA]).get(STEP_METADATA) != metadata:
            self._objects.remove(dict(reversed(commits.items())))
            raise self._objects.lost(STEP_METADATA)
        if not self._in_bucket:
            self._writes.check()
            self._folder.rename(self._final)

    def _database_of(self, process: int) -> str:
        return f"{ITEM}/{self._writes.database_of(process)}"

    def _documents(self) -> dict[str, bytes]:
        process = jax.process_index()
        found = {_arrays_name(process): self._arrays_document}
        if process == self._first:
            found[f"{ITEM}/{TREE}"] = self._tree.document()
            found[f"{ITEM}/{documents.SHARDINGS}"] = documents.shardings(self._tree.arrays)
        return {name: text.encode() for name, text in found.items() if text is not None}

    def _check_others(self) -> None:
        """Raise CorruptData when another writer divided the arrays in another way."""
        if self._arrays_document is None:
            return
        names = {writer: _arrays_name(writer) for writer in self._others}
        found = self._objects.read(names.values())
        for writer, name in names.items():
            path, written = f"{self._folder}/{name}", found.get(name)
            documents.check_same_arrays(self._arrays_document, written, path, writer)

    def _metadata(self, committed_ns: int | None) -> bytes:
        """Return the document of the step, as Orbax's manager writes it."""
        ours = {"run_id": self._save.run_id, "incarnation": self._save.incarnation}
        return json.dumps(
            {
                "item_handlers": {ITEM: ocp.PyTreeCheckpointHandler.typestr()},
                "metrics": {},
                "performance_metrics": {},
                "init_timestamp_nsecs": self._begun_ns,
                "commit_timestamp_nsecs": committed_ns,
                "custom_metadata": {OURS: ours},
            }
        ).encode()


def _arrays_name(process: int) -> str:
    return f"{ITEM}/{documents.arrays_name(process)}"


def _manifest(database: UnpublishedDatabase, folder: str) -> dict[str, bytes]:
    manifest = database.manifest()
    return {} if manifest is None else {f"{folder}/{MANIFEST}": manifest}
