"""The write of a step by some processes of the job, with Orbax's folders and commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

# The options of a public handler, which otherwise only Orbax's manager can set.
from orbax.checkpoint._src.handlers.composite_checkpoint_handler import CompositeOptions

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.bucket.step_writer import BucketStepWriter
from emergency_ckpt.tiers.persistent.item import documents
from emergency_ckpt.tiers.persistent.item.array_writes import ArrayWrites
from emergency_ckpt.tiers.persistent.item.documents import ItemTree
from emergency_ckpt.tiers.persistent.marker import ITEM, OURS
from emergency_ckpt.tiers.persistent.meetings import BEGUN, WRITTEN, Meet
from emergency_ckpt.tiers.persistent.orbax_names import TREE
from emergency_ckpt.tiers.persistent.orbax_reader import in_bucket
from emergency_ckpt.types import SaveId


class _Item:
    """The item of one save, in the place of Orbax's handler of pytrees."""

    def __init__(
        self,
        state: Any,
        writers: Sequence[int],
        writes: ArrayWrites,
        meet: Meet,
    ) -> None:
        self._databases = frozenset(map(writes.database_of, writers))
        self._tree = ItemTree(state)
        self._first, self._others = writers[0], tuple(writers[1:])
        self._writes = writes
        self._meet = meet
        self._arrays_document = documents.array_metadata(self._tree.arrays)

    @property
    def is_first(self) -> bool:
        return jax.process_index() == self._first

    def handler(self) -> ocp.PyTreeCheckpointHandler:
        """Return a handler that writes this item."""
        handler = ocp.PyTreeCheckpointHandler()
        # Set on the object, because the name of a subclass would be written into the step.
        handler.async_save = self._save
        handler.finalize = self._finalize
        return handler

    async def _save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._meet(BEGUN)
        self._writes.write(directory, self._tree.arrays, lambda: self._write_documents(directory))

    def _write_documents(self, directory: epath.Path) -> None:
        if self._arrays_document is not None:
            path = directory / documents.arrays_name(jax.process_index())
            # Each writer makes the folder itself: the first one may have failed.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._arrays_document)
        if self.is_first:
            (directory / TREE).write_text(self._tree.document())
            shardings = documents.shardings(self._tree.arrays)
            if shardings is not None:
                (directory / documents.SHARDINGS).write_text(shardings)

    def _finalize(self, directory: epath.Path) -> None:
        """Merge the databases of all writers into that of the item, as Orbax does."""
        self._meet(WRITTEN)  # only the first writer commits
        self._writes.check()
        self._check_others(directory)
        if not self._tree.arrays:
            return
        context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        own: Any = _Databases(directory, self._databases)
        asyncio.run(
            ocp.type_handlers.merge_ocdbt_per_process_files(
                own, ts_context=context, use_zarr3=False
            )
        )

    def _check_others(self, directory: epath.Path) -> None:
        """Raise CorruptData when another writer divided the arrays in another way."""
        if self._arrays_document is None:
            return
        for writer in self._others:
            path = directory / documents.arrays_name(writer)
            written = path.read_bytes()
            documents.check_same_arrays(self._arrays_document, written, str(path), writer)


class _Databases:
    """The folder of an item, in which Orbax finds the databases of one attempt alone."""

    def __init__(self, item: epath.Path, names: frozenset[str]) -> None:
        self._item = item
        self._names = names

    def as_posix(self) -> str:
        return self._item.as_posix()

    def glob(self, pattern: str) -> list[epath.Path]:
        """Return the databases that are there. PersistentTierError when there is none."""
        found = [path for path in self._item.glob(pattern) if path.name in self._names]
        if not found:
            problem = "what was written is gone: does another life of the run save there?"
            raise PersistentTierError("save", str(self._item), problem)
        return found

    def __str__(self) -> str:
        return str(self._item)


def write_step(
    directory: epath.Path,
    save: SaveId,
    state: Any,
    writers: Sequence[int],
    writes: ArrayWrites,
    *,
    meet: Meet,
) -> None:
    """Write ``state`` as Orbax's step. Collective over ``writers`` through ``meet``; blocks.

    ``state``: as ``item_state`` returns it. Each writer runs Orbax as a single-process job, because
    Orbax's barriers have fixed timeouts of minutes and a thread blocked in one aborts the process
    at exit. Into a bucket the step is written without Orbax, in a tenth of the requests.
    """
    if in_bucket(directory):
        BucketStepWriter(directory, save, state, writers, writes, meet=meet).write()
        return
    item = _Item(state, writers, writes, meet)
    processes = ocp.options.MultiprocessingOptions(
        primary_host=writers[0], active_processes={jax.process_index()}
    )
    committed = _committed_if(writes.check, directory / str(save.step))
    ours = {"run_id": save.run_id, "incarnation": save.incarnation}
    items: dict[str, Any] = {ITEM: item.handler()}
    together = ocp.CompositeCheckpointHandler(
        composite_options=CompositeOptions(
            multiprocessing_options=processes,
            temporary_path_class=committed,
            # In the background the item's folder could be made after another writer's first bytes
            # in it, and then fail. So it is made first.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        ),
        **items,
    )
    # The checkpointer of Orbax's manager. The manager itself lists the directory first, and fails
    # when a step is removed meanwhile.
    with ocp.Checkpointer(
        together, multiprocessing_options=processes, temporary_path_class=committed
    ) as checkpointer:
        args = ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(None)})
        # In an object store the first writer may already have begun; the others remove nothing.
        target, force = directory / str(save.step), not item.is_first
        checkpointer.save(target, args=args, force=force, custom_metadata={OURS: ours})
    if not item.is_first:
        meet(WRITTEN)


def _committed_if(check: Callable[[], None], step: epath.Path) -> type[Any]:
    """Return Orbax's class that commits ``step``, with a call of ``check`` before the commit."""
    default: type[Any] = ocp.path.atomicity_defaults.get_default_temporary_path_class(step)

    class Checked(default):
        async def finalize(self) -> None:
            check()
            await super().finalize()

    return Checked
