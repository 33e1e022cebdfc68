"""What of Orbax writes a state when not all processes of the job do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

# The options of a public handler; Orbax's manager alone gives them otherwise.
from orbax.checkpoint._src.handlers.composite_checkpoint_handler import CompositeOptions

# What Orbax's default array handler keeps PRNG implementations in has no public name.
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata.array_metadata import SerializedArrayMetadata
from orbax.checkpoint.future import Future

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.types import SaveId, ShardId

ITEM = "default"
"""The item of a step that has the arrays, as Orbax's manager calls it."""

OURS = "emergency_ckpt"
"""Among the custom metadata of a step: it was written here, and its marker comes last."""

BEGUN = "tensors_begun"
WRITTEN = "tensors_written"
MEETINGS = (BEGUN, WRITTEN)
"""The folders are there, which the first writer makes; all is written, which it then commits."""

Meet = Callable[[str, Sequence[int], float], None]
"""Tell the other writers that this one has come so far, and wait for some of them.

Called with one of ``MEETINGS``, those to wait for, and a deadline of ``time.monotonic``. Raises at
the deadline, or when one of them has failed.
"""


def meet_nobody(name: str, others: Sequence[int], deadline_s: float) -> None:
    """The ``Meet`` of a single writer."""
    del name, others, deadline_s


class _WritersOnly(array_metadata_store.Validator):
    """Orbax's own checks between writers; a single one has nothing to be compared with."""

    def validate_all_array_metadatas(
        self, array_metadatas: dict[int, list[SerializedArrayMetadata]]
    ) -> None:
        if len(array_metadatas) > 1:
            super().validate_all_array_metadatas(array_metadatas)


class _MetadataStore(array_metadata_store.Store):
    """Each writer makes the folder itself.

    In Orbax the others look for it, four times a second, however the first one fares.
    """

    def __init__(self) -> None:
        super().__init__(primary_host=None)

    def set_primary_host(self, primary_host: int | None) -> None:
        """Orbax's handler sets its own; all stay."""
        del primary_host


class ArrayWriter(ocp.type_handlers.ArrayHandler):
    """Orbax's own, whose writes can be cancelled. For one save.

    A single writer does not share the work with the other replicas.
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
        """Whether nobody waits for this save any more."""
        return self._is_cancelled

    def check(self) -> None:
        """PersistentTierError once the save is cancelled: storage may answer long after that."""
        if self._is_cancelled:
            raise PersistentTierError("save", "a step", "the save was given up")

    async def serialize(self, *args: Any, **kwargs: Any) -> Sequence[Future]:
        """As Orbax's."""
        self.check()
        futures = await super().serialize(*args, **kwargs)
        with self._lock:
            self._begun += futures
        if self._is_cancelled:  # while these were begun
            self._cancel_begun()
            self.check()
        return futures

    def cancel(self) -> None:
        """Nobody waits for what is being written any more. From any thread; does not block."""
        self._is_cancelled = True
        self._cancel_begun()

    def _cancel_begun(self) -> None:
        with self._lock:
            begun = list(self._begun)
        for future in begun:
            future.cancel()


def bytes_at_once(buffer_bytes: int, shards: Mapping[ShardId, HostShard]) -> int:
    """How much of ``shards`` may be on its way to storage; no less than the largest of them.

    Orbax refuses an array that is larger than what may be on its way.
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
    meet: Callable[[str, Sequence[int]], None],
) -> None:
    """Write ``state`` as Orbax's step. Collective over ``writers``, by ``meet`` alone; blocks.

    To Orbax each of them is the only one. Its own barriers have a deadline of minutes that cannot
    be set, and a thread that still sits in one aborts the process at its end.
    """
    first, others = writers[0], writers[1:]
    is_first = jax.process_index() == first
    processes = ocp.options.MultiprocessingOptions(
        primary_host=first, active_processes={jax.process_index()}
    )
    handler = _writing_handler(processes, arrays, at_once_bytes=at_once_bytes)
    begin, finalize = handler.async_save, handler.finalize

    # Set on the object: the name of a class of our own would be written into the step.
    @functools.wraps(begin)
    async def meet_and_begin(*args: Any, **kwargs: Any) -> Any:
        meet(BEGUN, () if is_first else (first,))
        return await begin(*args, **kwargs)

    @functools.wraps(finalize)
    def meet_and_finalize(directory: epath.Path) -> None:
        meet(WRITTEN, others)  # only the first writer comes here
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
            # Made in the background, the item's folder could come after the first bytes that
            # another writer puts below it, and then fail: the others begin when it is there.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        ),
        **items,
    )
    # What Orbax's manager saves a step with. The manager itself lists the directory first, and
    # fails on a step that is being removed meanwhile.
    with ocp.Checkpointer(
        together, multiprocessing_options=processes, temporary_path_class=committed
    ) as checkpointer:
        args = ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(state)})
        # In an object store the first writer may have begun already: the others do not mind, and
        # remove nothing.
        target, force = directory / str(save.step), not is_first
        checkpointer.save(target, args=args, force=force, custom_metadata={OURS: ours})
    if not is_first:
        meet(WRITTEN, ())


def _committed_if(check: Callable[[], None], step: epath.Path) -> type[Any]:
    """Orbax's own way to commit ``step``, which first asks ``check``."""
    default: type[Any] = ocp.path.atomicity_defaults.get_default_temporary_path_class(step)

    class Checked(default):
        async def finalize(self) -> None:
            check()
            await super().finalize()

    return Checked


def _writing_handler(
    together: ocp.options.MultiprocessingOptions, arrays: ArrayWriter, *, at_once_bytes: int
) -> ocp.PyTreeCheckpointHandler:
    """Orbax's own handler; ``at_once_bytes``: how much may be on its way to storage at once."""
    scalars, numpys = ocp.type_handlers.ScalarHandler(), ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (int, scalars), (float, scalars), (np.ndarray, numpys), (jax.Array, arrays)
    )
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=-(-at_once_bytes // 10**9) + 1,
        multiprocessing_options=together,
        type_handler_registry=registry,
        array_metadata_validator=_WritersOnly(),
    )
