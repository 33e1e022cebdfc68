"""The write of a step into a bucket by some processes of the job, as Orbax's objects.

1. The first writer creates ``_CHECKPOINT_METADATA``: it has claimed the step's place.
2. Each writer writes its arrays, and beside them the documents.
3. The first writer merges the databases of the others into its own.
4. It creates the item's manifest, then replaces ``_CHECKPOINT_METADATA``, if it is still that of 1,
   by one with the time of the commit.
5. It creates ``commit_success.txt`` of the item, then that of the step: Orbax counts it. If the
   place was cleared between 4 and 5, it removes both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.tiers.persistent.bucket.database import BucketDatabase
from emergency_ckpt.tiers.persistent.bucket.objects import StepObjects
from emergency_ckpt.tiers.persistent.item import documents
from emergency_ckpt.tiers.persistent.item.array_writes import ArrayWrites
from emergency_ckpt.tiers.persistent.item.documents import ItemTree
from emergency_ckpt.tiers.persistent.marker import ITEM, OURS
from emergency_ckpt.tiers.persistent.meetings import BEGUN, WRITTEN, Meet
from emergency_ckpt.tiers.persistent.orbax_names import COMMITTED, MANIFEST, STEP_METADATA, TREE
from emergency_ckpt.types import SaveId


class BucketStepWriter:
    """One process's part of one step. ``write`` is called once.

    Args:
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
        self._folder = str(directory / str(save.step))
        self._save = save
        self._tree = ItemTree(state)
        self._first, self._others = writers[0], tuple(writers[1:])
        self._writes = writes
        self._meet = meet
        self._objects = StepObjects(self._folder)
        self._begun_ns = time.time_ns()
        self._arrays_document = documents.array_metadata(self._tree.arrays)

    def write(self) -> None:
        """Write this process's part; the first writer returns when Orbax counts the step.

        Blocks. PersistentTierError, also once the save is cancelled; CorruptData; errors of
        TensorStore pass through.
        """
        process = jax.process_index()
        if process != self._first:
            self._meet(BEGUN)
            folder = self._database_of(process)
            database = self._write_arrays(folder)
            self._writes.check()
            self._objects.write(_manifest(database, folder))
            self._meet(WRITTEN)
            return
        claim = self._objects.write({STEP_METADATA: self._metadata(None)})[STEP_METADATA]
        self._meet(BEGUN)
        database = self._write_arrays(ITEM)
        self._meet(WRITTEN)
        self._check_others()
        database.merge([f"{self._folder}/{self._database_of(other)}" for other in self._others])
        self._commit(claim, _manifest(database, ITEM))

    def _write_arrays(self, folder: str) -> BucketDatabase:
        """Write the arrays of this process into a database in ``folder``, and the documents."""
        database = BucketDatabase(f"{self._folder}/{folder}", self._writes)
        documents_written = self._objects.begin(self._documents())
        try:
            self._writes.write_into(database.store, self._tree.arrays)
        except BaseException:
            documents_written.settle()
            raise
        documents_written.generations()
        return database

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


def _manifest(database: BucketDatabase, folder: str) -> dict[str, bytes]:
    manifest = database.manifest()
    return {} if manifest is None else {f"{folder}/{MANIFEST}": manifest}
