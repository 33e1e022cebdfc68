"""The write of a step through Orbax by some processes of the job instead of all."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

# The options of a public handler, which otherwise only Orbax's manager can set.
from orbax.checkpoint._src.handlers.composite_checkpoint_handler import CompositeOptions

# The store in which Orbax's default array handler keeps PRNG implementations is not public.
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata.array_metadata import SerializedArrayMetadata
from orbax.checkpoint.future import Future

from emergency_ckpt.core.placement.writers import StorageCompression
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.tiers.persistent.marker import ITEM, OURS
from emergency_ckpt.tiers.persistent.meetings import BEGUN, WRITTEN
from emergency_ckpt.types import SaveId, ShardId


class _WritersOnly(array_metadata_store.Validator):
    """Orbax's comparison of metadata between writers; a single writer has none to compare."""

    def validate_all_array_metadatas(
        self, array_metadatas: dict[int, list[SerializedArrayMetadata]]
    ) -> None:
        if len(array_metadatas) > 1:
            super().validate_all_array_metadatas(array_metadatas)


class _MetadataStore(array_metadata_store.Store):
    """A metadata store in which each writer makes the folder itself.

    In Orbax the other writers poll for it four times a second, also when the first one has failed.
    """

    def __init__(self) -> None:
        super().__init__(primary_host=None)

    def set_primary_host(self, primary_host: int | None) -> None:
        """Ignore the primary host that Orbax's handler sets."""
        del primary_host


class ArrayWriter(ocp.type_handlers.ArrayHandler):
    """Orbax's array handler with writes that can be cancelled. For one save.

    A single writer does not divide the work among replicas.
    """

    def __init__(self, writers: Sequence[int]) -> None:
        super().__init__(
            primary_host=writers[0],
            use_replica_parallel=len(writers) > 1,
            array_metadata_store=_MetadataStore(),
        )
        self._lock = threading.Lock()
        self._begun: list[Future] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Return True once the save was cancelled."""
        return self._is_cancelled

    def check(self) -> None:
        """Raise PersistentTierError once the save is cancelled, since storage may answer later."""
        if self._is_cancelled:
            raise PersistentTierError("save", "a step", "the save was cancelled")

    async def serialize(self, *args: Any, **kwargs: Any) -> Sequence[Future]:
        """Begin the writes as Orbax's handler does."""
        self.check()
        futures = await super().serialize(*args, **kwargs)
        with self._lock:
            self._begun += futures
        if self._is_cancelled:  # while these writes began
            self._cancel_begun()
            self.check()
        return futures

    def cancel(self) -> None:
        """Cancel the writes in progress. Thread-safe; does not block."""
        self._is_cancelled = True
        self._cancel_begun()

    def _cancel_begun(self) -> None:
        with self._lock:
            begun = list(self._begun)
        for future in begun:
            future.cancel()


def bytes_at_once(buffer_bytes: int, shards: Mapping[ShardId, HostShard]) -> int:
    """Return the maximum number of bytes of ``shards`` to write at once.

    It is at least the largest of them, because Orbax refuses an array above its limit.
    """
    leaves: dict[str, int] = {}
    for shard, each in shards.items():
        leaves[shard.leaf] = leaves.get(shard.leaf, 0) + each.view.nbytes
    return max(buffer_bytes, min(sum(leaves.values()), 2 * max(leaves.values(), default=0)))


def write_step(
    directory: epath.Path,
    save: SaveId,
    state: Any,
    writers: Sequence[int],
    arrays: ArrayWriter,
    *,
    at_once_bytes: int,
    compression: StorageCompression,
    meet: Callable[[str, Sequence[int]], None],
) -> None:
    """Write ``state`` as Orbax's step. Collective over ``writers`` through ``meet``; blocks.

    Each writer runs Orbax as a single-process job, because Orbax's barriers have fixed timeouts of
    minutes and a thread blocked in one aborts the process at exit.
    """
    first, others = writers[0], writers[1:]
    is_first = jax.process_index() == first
    processes = ocp.options.MultiprocessingOptions(
        primary_host=first, active_processes={jax.process_index()}
    )
    handler = _writing_handler(
        processes, arrays, at_once_bytes=at_once_bytes, compression=compression
    )
    begin, finalize = handler.async_save, handler.finalize

    # Set on the object, because the name of a subclass would be written into the step.
    @functools.wraps(begin)
    async def meet_and_begin(*args: Any, **kwargs: Any) -> Any:
        meet(BEGUN, () if is_first else (first,))
        return await begin(*args, **kwargs)

    @functools.wraps(finalize)
    def meet_and_finalize(directory: epath.Path) -> None:
        meet(WRITTEN, others)  # only the first writer commits
        arrays.check()
        finalize(directory)

    handler.async_save = meet_and_begin
    handler.finalize = meet_and_finalize
    committed = _committed_if(arrays.check, directory / str(save.step))
    ours = {"run_id": save.run_id, "incarnation": save.incarnation}
    items: dict[str, Any] = {ITEM: handler}
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
        args = ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(state)})
        # In an object store the first writer may already have begun; the others remove nothing.
        target, force = directory / str(save.step), not is_first
        checkpointer.save(target, args=args, force=force, custom_metadata={OURS: ours})
    if not is_first:
        meet(WRITTEN, ())


def _committed_if(check: Callable[[], None], step: epath.Path) -> type[Any]:
    """Return Orbax's class that commits ``step``, with a call of ``check`` before the commit."""
    default: type[Any] = ocp.path.atomicity_defaults.get_default_temporary_path_class(step)

    class Checked(default):
        async def finalize(self) -> None:
            check()
            await super().finalize()

    return Checked


def _writing_handler(
    together: ocp.options.MultiprocessingOptions,
    arrays: ArrayWriter,
    *,
    at_once_bytes: int,
    compression: StorageCompression,
) -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler; ``at_once_bytes``: maximum number of bytes to write at once."""
    scalars, numpys = ocp.type_handlers.ScalarHandler(), ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (int, scalars), (float, scalars), (np.ndarray, numpys), (jax.Array, arrays)
    )
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=-(-at_once_bytes // 10**9) + 1,
        multiprocessing_options=together,
        type_handler_registry=registry,
        array_metadata_validator=_WritersOnly(),
        use_compression=compression == "zstd",
    )
